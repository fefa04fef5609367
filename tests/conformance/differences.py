"""Tests of Keras that pass on Keras's trainer and, for a reason given here, not on fitstep's.

The list is strict: a test that is missing here fails `make conformance`, and so does one that is
listed here but passes, or that Keras does not have. A test's name is its file below Keras's `src`
folder, its class and its method, as `make conformance` prints it:

    "trainers/trainer_test.py::TestTrainer::test_something": "what differs, and why that is right",
"""

DIFFERENCES: dict[str, str] = {}
