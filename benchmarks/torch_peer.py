"""PyTorch's side of `peers`: a program for another Python, which has torch and maybe lightning.

It reads a folder of data and initial weights, says in a line of JSON what it is, and then answers
each line `LOOP MODEL` by an epoch and its mean loss. It imports nothing of fitstep.
"""

import importlib.util
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

EPSILON = 1e-7  # of Keras's Adam; the learning rate is the same


class Task:
    """A model with its data, loss and optimizer."""

    def __init__(self, folder: Path, name: str, fused: bool):
        arrays = np.load(folder / f"{name}.npz")
        self.x, self.y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        weights = [torch.from_numpy(arrays[f"weight {i}"]) for i in range(len(arrays.files) - 3)]
        self.batch_size = int(arrays["batch_size"])
        if name == "CNN":
            self.x = self.x.permute(0, 3, 1, 2).contiguous()
        self.model = {"MLP": mlp, "CNN": cnn}[name]()
        self.loss = {"MLP": nn.MSELoss, "CNN": nn.CrossEntropyLoss}[name]()
        ours = list(self.model.parameters())
        for parameter, weight in zip(ours, weights, strict=True):
            parameter.data = laid_out(weight, parameter.shape)
        self.optimizer = torch.optim.Adam(ours, eps=EPSILON, fused=fused)


def mlp() -> nn.Module:
    hidden = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.BatchNorm2d(16, eps=1e-3, momentum=0.01),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(800, 10),
    )


def laid_out(weight: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A weight of Keras (channels last, inputs first) as PyTorch has it."""
    if weight.ndim == 4:  # height, width, in, out
        weight = weight.permute(3, 2, 0, 1)
    elif shape == (10, 800):  # behind Flatten, which counts channels last in Keras
        weight = weight.reshape(5, 5, 32, 10).permute(3, 2, 0, 1).reshape(10, 800)
    elif weight.ndim == 2:
        weight = weight.T
    assert weight.shape == shape
    return weight.contiguous().clone()


def raw(task: Task, shuffle: bool = True) -> float:
    """The loop that PyTorch's tutorials teach, with whole batches gathered by index."""
    task.model.train()
    rows = len(task.x)
    order = torch.randperm(rows) if shuffle else torch.arange(rows)
    total = torch.zeros(())
    for batch in order.split(task.batch_size):
        task.optimizer.zero_grad()
        loss = task.loss(task.model(task.x[batch]), task.y[batch])
        loss.backward()
        task.optimizer.step()
        total += loss.detach() * len(batch)
    return float(total) / rows


def lightning(task: Task):
    """An epoch by Lightning's trainer, without logger, bar, checkpoints and summary."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = task.model

        def training_step(self, batch, index):
            x, y = batch
            loss = task.loss(self.model(x), y)
            # Kept on the device and averaged at the epoch's end, as `fit` does with its logs.
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return task.optimizer

    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False
    )
    trainer, module = pl.Trainer(accelerator="cpu", max_epochs=0, **quiet), Module()
    data = TensorDataset(task.x, task.y)
    batches = BatchSampler(RandomSampler(data), task.batch_size, drop_last=False)
    loader = DataLoader(data, sampler=batches, batch_size=None)  # gathers a batch at a time

    def epoch() -> float:
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)
        return float(trainer.callback_metrics["loss"])

    return epoch


def best_threads(folder: Path, name: str, most: int) -> int:
    """One thread or all, whichever is faster: a small step only waits for a second one."""
    taken = {}
    for threads in (1, most):
        torch.set_num_threads(threads)
        task = Task(folder, name, fused=True)
        few = 20 * task.batch_size
        task.x, task.y = task.x[:few], task.y[:few]
        raw(task)
        start = time.perf_counter()
        raw(task)
        taken[threads] = time.perf_counter() - start
    return min(taken, key=taken.__getitem__)


def checked(folder: Path, name: str) -> float:
    """The mean loss of an unshuffled epoch without Dropout."""
    task = Task(folder, f"{name}", fused=False)
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    few = 16 * task.batch_size
    task.x, task.y = task.x[:few], task.y[:few]
    return raw(task, shuffle=False)


def main() -> None:
    warnings.simplefilter("ignore")  # Lightning advises to load data in other processes
    folder, most = Path(sys.argv[1]), int(sys.argv[2])
    names = ("MLP", "CNN")
    threads = {name: best_threads(folder, name, most) for name in names}
    loops = {}
    for name in names:
        plain, fused = Task(folder, name, fused=False), Task(folder, name, fused=True)
        loops[f"raw {name}"] = lambda task=plain: raw(task)
        loops[f"fused {name}"] = lambda task=fused: raw(task)
        loops[f"check {name}"] = lambda name=name: checked(folder, name)
        if importlib.util.find_spec("lightning"):
            loops[f"lightning {name}"] = lightning(Task(folder, name, fused=True))
    about = {"torch": torch.__version__, "threads": threads, "loops": list(loops)}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        torch.set_num_threads(threads[line.split()[1]])
        print(loops[line.strip()](), flush=True)


if __name__ == "__main__":
    main()
