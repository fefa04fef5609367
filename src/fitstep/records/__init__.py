"""What a training run leaves behind, and what it says while it lasts.

The files of a run folder (`_run_folder`, `_json`, `_curves`, `_environment`), the lines or bars on
the console (`_console`), and the Keras callback that feeds both after each epoch (`_recorder`).
"""
