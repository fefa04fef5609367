"""The feed of a run: passes over the data, cut into the epochs or rounds that callbacks hear of."""

import math
from collections.abc import Iterator
from typing import Any

from fitstep._errors import DataError
from fitstep._keras import _data
from fitstep._warn import warn
from fitstep.engine._passes import Chunk, Kind, Passes, kind_of_rows


class Epochs:
    """Epochs as Keras has them: a pass each, or `steps` batches, going on where the last ended.

    Args:
        source: where the batches come from.
        epochs: the number of the last epoch, counted from 0, plus one.
        steps: the batches of an epoch; None takes a whole pass.
        warns: whether to say that a source which is iterated once has ended.

    Attributes:
        remaining: the batches of all epochs to come; not counted here.
    """

    remaining: int | None = None

    def __init__(
        self,
        source: _data.Source,
        *,
        epochs: int = 1,
        steps: int | None = None,
        warns: bool = True,
    ):
        self.source = source
        self._warns = warns
        self._epochs = epochs
        self._steps = steps
        self._passes = Passes(source)
        self._left: int | None = None
        self._inferred: int | None = None

    @property
    def steps(self) -> int | None:
        """The steps of an epoch, if that is known."""
        return self._steps or self.source.num_batches or self._inferred

    @property
    def epochs(self) -> int:
        """The number of epochs, for the callbacks."""
        return self._epochs

    def first_batch(self) -> Any:
        """The first batch, to build the model on; it is still the first to be drawn."""
        return self._passes.first_batch()

    def known_kind(self) -> Kind | None:
        """The kind of the first batches, if it is known without drawing one."""
        if not isinstance(self.source, _data.ArraySource):
            return None
        return kind_of_rows(self.source, self.source.batch_size)

    def restart(self) -> None:
        """Begin with a new pass, and forget what was only looked at, where Keras does."""
        self._passes.restart()

    def indices(self, first: int) -> Iterator[int]:
        """The numbers of the epochs."""
        yield from range(first, self._epochs)

    def begin(self) -> None:
        """Begin an epoch."""
        self._passes.tell_begin()
        if self._steps is None and self._passes.drawn:
            self._passes.end()
        self._left = self._steps or self.source.num_batches

    def at_end(self) -> bool:
        """Whether it is known that no batch follows in this epoch; nothing is drawn to find out."""
        batches = self.source.num_batches
        if self._left and batches and self._passes.drawn >= batches:
            self._out_of_data()
        return self._left == 0

    def peek(self) -> Kind | None:
        """The kind of the next batch; None at the end of the epoch."""
        if self._left == 0:
            return None
        kind = self._passes.peek()
        if kind is None:
            self._out_of_data()
        return kind

    def draw(self, most: int, width: int, *, prompt: bool = False) -> Chunk:
        """The next batches, as a pass draws them."""
        most = most if self._left is None else min(most, self._left)
        chunk = self._passes.draw(most, width, left=self._left, prompt=prompt)
        if self._left is not None:
            self._left -= chunk.count
        return chunk

    def end(self) -> None:
        """End the epoch."""
        if self.source.num_batches and self._passes.drawn >= self.source.num_batches:
            self._passes.end()
        self._passes.tell_end()

    def close(self) -> None:
        """End what is under way, also after a failure."""
        self._passes.close()

    def _out_of_data(self) -> None:
        if self._inferred is None:
            self._inferred = self._passes.drawn
        self._passes.end()
        self._left = 0
        # A source of unknown length that starts anew has ended an epoch, not interrupted it.
        if self._steps or (self.source.once and self._warns):
            warn(
                "Your input ran out of data; interrupting training. Make sure that your dataset "
                "or generator can generate at least `steps_per_epoch * epochs` batches. You may "
                "need to use the `.repeat()` function when building your dataset.",
            )


class Rounds:
    """Rounds of `steps` batches each, which go on over the ends of passes; the last may be short.

    Args:
        source: where the batches come from.
        passes: how often to go over the data.
        steps: the batches of a round.
        most: the batches of all rounds, if they are limited.

    Attributes:
        epochs: how many rounds there will be; infinity if that is not known.
        remaining: the batches of all rounds to come, if that is known.
    """

    def __init__(self, source: _data.Source, *, passes: int, steps: int, most: int | None = None):
        self.source = source
        self.steps = steps
        self._all_passes = self._passes_left = passes
        self._passes = Passes(source)
        self._left = 0
        self.remaining = None if source.num_batches is None else source.num_batches * passes
        known = [count for count in (self.remaining, most) if count is not None]
        self.epochs = -(-min(known) // steps) if known else math.inf

    def first_batch(self) -> Any:
        """The first batch, to build the model on; it is still the first to be drawn."""
        return self._passes.first_batch()

    def restart(self) -> None:
        """Forget what was only looked at, where Keras does."""
        self._passes.restart()

    def indices(self, first: int) -> Iterator[int]:
        """The numbers of the rounds, for as long as there is data; those before `first` are skipped."""
        index = 0
        while self._next_in_passes() is not None:
            if index < first:
                self._skip()
            else:
                yield index
            index += 1

    def begin(self) -> None:
        """Begin a round."""
        self._left = self.steps

    def at_end(self) -> bool:
        """Whether no batch follows in this round."""
        return self.peek() is None

    def peek(self) -> Kind | None:
        """The kind of the next batch; None at the end of the round."""
        return self._next_in_passes() if self._left else None

    def draw(self, most: int, width: int, *, prompt: bool = False) -> Chunk:
        """The next batches, as a pass draws them."""
        most = min(most, self._left)
        chunk = self._passes.draw(most, width, left=self._left, prompt=prompt)
        self._left -= chunk.count
        if self.remaining is not None:
            self.remaining -= chunk.count
        return chunk

    def end(self) -> None:
        """End the round; its pass goes on."""

    def close(self) -> None:
        """End what is under way, also after a failure."""
        self._passes.close()

    def _next_in_passes(self) -> Kind | None:
        while self._passes_left:
            if (kind := self._passes.peek()) is not None:
                return kind
            drawn, done = self._passes.drawn, self._all_passes - self._passes_left
            self.close()
            self._passes_left = self._passes_left - 1 if drawn else 0
            if not drawn and not done:
                raise DataError("The data for training has no batch. Give at least one row.")
            if not drawn:
                warn(
                    f"The source ran out of data after {done} of {self._all_passes} passes; "
                    f"training ends. A generator is iterated once: give one that goes on, with "
                    f"`max_steps`, or a source that starts anew, such as a `PyDataset`.",
                )
        return None

    def _skip(self) -> None:
        self.begin()
        while self.peek() is not None:
            self.draw(1, 1)


Feed = Epochs | Rounds
