"""The processes that train one model together, and the few words that they exchange.

Every rank holds the whole model. What differs between ranks is only which samples of a step they compute; all else is
done alike by all of them, from the same numbers. torch is imported when it is needed: workarounds come before it.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from surefoot.errors import UserError, WorkError
from surefoot.train.last_words import FAILED, PATIENCE, why_missing, within
from surefoot.train.place import Place, backend_of

if TYPE_CHECKING:
    import torch

    from surefoot.config import Config

T = TypeVar("T")

FIRST = "surefoot/first"  # in the store that all ranks share
GRACE = 1.0  # seconds that the others are given to read the last word of a rank
MOST_BYTES = 512 * 2**20  # of gradients that are summed at once: a full fine-tune's need not be held twice


class OtherRankError(WorkError):
    """Another rank could not go on, and so neither can this one; that rank says more."""


@dataclass
class Ranks:
    """This process among those of its run; made without arguments it is alone, and nothing here costs anything.

    Attributes:
        place: which one it is.
        names: of all ranks, with host and device, as "rank 1 (node7, cuda:1)".
        timeout: seconds for which a rank waits for the others.
        store: words that can be left for others, also when a collective has failed.
    """

    place: Place = field(default_factory=Place)
    names: tuple[str, ...] = ("this process",)
    timeout: float = 0.0
    store: Any = None

    @classmethod
    def join(cls, cfg: Config, device: str, environ: Mapping[str, str]) -> Ranks:
        """Meet the other processes of this run; a process that is alone meets nobody.

        Args:
            cfg: the YAML; `ddp_timeout` and `ddp_backend` are read.
            device: of this process, as torch names it.
            environ: of this process.

        Returns:
            The ranks.

        Raises:
            WorkError: the others did not come.
        """
        place = Place.of(environ)
        if place.world == 1:
            return cls()
        import torch
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        wait = timedelta(seconds=cfg.ddp_timeout)
        backend = backend_of(cfg, device)
        if device != "cpu":
            torch.cuda.set_device(device)
        try:
            met, rank, world = next(rendezvous("env://", rank=place.rank, world_size=place.world, timeout=wait))
            # The launcher's store outlives a restart, and with it the addresses of processes that are gone.
            store = dist.PrefixStore(f"attempt {place.restarts}", met)
            dist.init_process_group(
                backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world, timeout=wait
            )
        except (RuntimeError, ValueError) as error:
            raise WorkError(
                f"rank {place.rank} did not meet the other {place.world - 1}: {_first_line(error)}",
                hint="are MASTER_ADDR and MASTER_PORT reachable from every machine, and were all processes started?",
            ) from error
        ranks = cls(place, tuple(f"rank {r}" for r in range(world)), float(cfg.ddp_timeout), store)
        own = f"rank {rank} ({socket.gethostname()}, {device})"
        ranks.names = tuple(ranks.gather(own))
        return ranks

    @property
    def alone(self) -> bool:
        """True in a run of one process."""
        return self.place.world == 1

    @property
    def is_main(self) -> bool:
        """True for the one that writes files and talks to the person."""
        return self.place.rank == 0

    def seed(self, seed: int, step: int) -> None:
        """Draw a step's random numbers from seed, step and rank, so that a resumed run draws the same.

        Args:
            seed: of the run.
            step: counted from 1.
        """
        import numpy as np
        import torch

        drawn = int(np.random.SeedSequence([seed % 2**32, step, self.place.rank]).generate_state(1)[0])
        random.seed(drawn)
        np.random.seed(drawn)
        torch.manual_seed(drawn)

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors over all ranks, in place: one all-reduce a dtype, or a few where they are large.

        Args:
            tensors: of the same shapes on every rank.
        """
        import torch
        import torch.distributed as dist

        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            for group in _bundles([tensor for tensor in tensors if tensor.dtype == dtype]):
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
                self.wait_for(lambda flat=flat: dist.all_reduce(flat))
                parts = flat.split([tensor.numel() for tensor in group])
                with torch.no_grad():
                    torch._foreach_copy_(
                        [tensor.detach() for tensor in group],
                        [part.view(tensor.shape) for part, tensor in zip(parts, group, strict=True)],
                    )

    def copy_from_main_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank the main one's values, bit for bit.

        Args:
            tensors: of the same shapes on every rank; changed in place.
        """
        import torch.distributed as dist

        for tensor in tensors if not self.alone else ():
            self.wait_for(lambda tensor=tensor: dist.broadcast(tensor.detach(), src=0))

    def spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """Collect a tensor of every rank without reading it.

        Args:
            numbers: of the same shape on every rank.

        Returns:
            Those of all, [ranks, ...].
        """
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(numbers) for _ in range(self.place.world)]
        self.wait_for(lambda: dist.all_gather(parts, numbers.contiguous()))
        return torch.stack(parts)

    def gather(self, value: T) -> list[T]:
        """Collect a small object of every rank.

        Args:
            value: plain data.

        Returns:
            Those of all, by rank.
        """
        if self.alone:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.place.world
        self.wait_for(lambda: dist.all_gather_object(values, value))
        return values

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Compare a few whole numbers over all ranks, on the host.

        Args:
            numbers: as many on every rank.

        Returns:
            The largest of each.
        """
        import torch
        import torch.distributed as dist

        largest = torch.tensor(numbers, dtype=torch.int64)
        if not self.alone:
            self.wait_for(lambda: dist.all_reduce(largest, op=dist.ReduceOp.MAX))
        return largest.tolist()

    def on(self, rank: int, work: Callable[[], T]) -> T:
        """Let one rank do something while the others wait for what comes of it.

        Args:
            rank: which one.
            work: holds no collective; returns plain data.

        Returns:
            What it returned, on every rank.

        Raises:
            OtherRankError: it raised there. On that rank its own exception goes on.
        """
        if self.alone:
            return work()
        import torch.distributed as dist

        box: list[Any] = [None]
        raised: Exception | None = None
        if self.place.rank == rank:
            try:
                box = [(True, work())]
            except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it before it goes on
                raised = error
                box = [(False, words_of(error))]
        try:
            self.wait_for(lambda: dist.broadcast_object_list(box, src=rank))
        finally:
            if raised is not None:
                raise raised
        done, value = box[0]
        if not done:
            raise OtherRankError(f"{self.names[rank]}: {value}")
        return value

    def same(self, what: str, value: T) -> T:
        """Make sure that all ranks hold the same.

        Args:
            what: it is, for the message.
            value: plain data; of a mapping, the first part that differs is named.

        Returns:
            The value.

        Raises:
            WorkError: a rank holds another.
        """
        values = self.gather(value)
        other = next((rank for rank, held in enumerate(values) if held != values[0]), None)
        if other is not None:
            mine, theirs = values[0], values[other]
            if isinstance(mine, dict) and isinstance(theirs, dict):
                what = next(key for key in mine if mine[key] != theirs.get(key))
                mine, theirs = mine[what], theirs.get(what)
            raise WorkError(
                f"{what} differs: {mine} on {self.names[0]}, {theirs} on {self.names[other]}",
                hint="every machine must see the same files (output_dir, model and data) and run the same versions",
            )
        return value

    def first_of_host(self, work: Callable[[bool], T]) -> T:
        """Let the first process of each machine do something before the others of it do.

        The others look for a word in the store, so that no collective times out however long it takes.

        Args:
            work: told whether this process is the first.

        Returns:
            What it returned here.

        Raises:
            OtherRankError: a rank failed meanwhile.
        """
        if self.alone:
            return work(True)
        key = f"{FIRST}/{socket.gethostname()}"
        if self.place.local_rank == 0:
            value = work(True)
            self.store.set(key, "done")
            return value
        while not self.wait_for(lambda: within(self.timeout, lambda: self.store.check([key]))):
            if self.store.check([FAILED]):
                self._cut_off(RuntimeError("a rank failed"))
            time.sleep(0.1)
        return work(False)

    def stop_for(self, error: Exception | None) -> NoReturn:
        """End the run on all ranks after one of them has raised a step's exception flag.

        Args:
            error: this rank's own; None on the others.

        Raises:
            OtherRankError: on the ranks without an error.
        """
        told = self.gather(words_of(error) if error is not None else None)
        if error is not None:
            raise error
        failed = next(rank for rank, words in enumerate(told) if words is not None)
        raise OtherRankError(f"{self.names[failed]}: {told[failed]}")

    def fail(self, error: Exception) -> NoReturn:
        """End this rank in the middle of a pass that holds collectives: the others cannot be met there any more.

        Args:
            error: that was raised there: by this rank's own work, or by torch because another rank is gone.

        Raises:
            OtherRankError: another rank is to blame. Otherwise the error itself goes on, and is announced.
        """
        if isinstance(error, OtherRankError) or not _is_of_talking(error):
            self.announce(error)
            raise error
        self._cut_off(error)

    def announce(self, error: BaseException) -> None:
        """Leave word of why this rank ends, for those that will miss it.

        Args:
            error: that ends it.
        """
        if self.alone or isinstance(error, OtherRankError):
            return

        def leave_word() -> None:
            if not self.store.check([FAILED]):
                self.store.set(FAILED, f"{self.place.rank} {words_of(error)}")
                if self.is_main:
                    time.sleep(GRACE)  # without torchrun the store is in this process

        try:
            within(PATIENCE, leave_word)
        except (RuntimeError, TimeoutError):
            return  # the process that kept the store is gone or stands still: nobody is left to read

    def leave(self) -> None:
        """Part from the others at the end of a run."""
        if self.alone:
            return
        import torch.distributed as dist

        self.gather(None)
        dist.destroy_process_group()

    def wait_for(self, collective: Callable[[], T]) -> T:
        """Run collectives, and say which rank is missing where the others no longer answer.

        Args:
            collective: runs them.

        Returns:
            What it returned.

        Raises:
            OtherRankError: a rank is gone or too late.
        """
        try:
            return collective()
        except (RuntimeError, TimeoutError) as error:  # what torch's backends raise when a rank is gone or too late
            self._cut_off(error)

    def _cut_off(self, error: Exception) -> NoReturn:
        """Say which rank is missing, and why if it has left word."""
        try:
            why = within(2 * PATIENCE, lambda: why_missing(self.store, self.names, self.place.rank))
            why = why or f"the ranks cannot talk any more: {_first_line(error)}"
        except RuntimeError:  # of the store
            why = f"{self.names[0]} is gone, and with it the others' meeting point"
        except TimeoutError:
            why = f"{self.names[0]} does not answer, nor the meeting point on its machine: stopped, or cut off"
        raise OtherRankError(why) from error


def _bundles(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Cut a list of tensors where they become too large to be copied at once."""
    bundles: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if not bundles or size + bytes_ > MOST_BYTES:
            bundles.append([])
            size = 0
        bundles[-1].append(tensor)
        size += bytes_
    return bundles


def _is_of_talking(error: Exception) -> bool:
    """Tell a collective's own failure from an error of the work between collectives."""
    import torch.distributed as dist

    # gloo reports by plain RuntimeErrors that name its source file or its way of failing.
    words = ("gloo", "connection closed", "connection reset", "nccl", "timed out waiting")
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(word in str(error).lower() for word in words)
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def words_of(error: BaseException) -> str:
    """Say what an exception is about, in one line.

    Args:
        error: any.

    Returns:
        Our own errors' message; of others the type as well.
    """
    if isinstance(error, UserError | WorkError):
        return error.problems[0].message
    return f"{type(error).__name__}: {_first_line(error)}"
