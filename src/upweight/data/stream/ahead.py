"""Encodes raw rows of streams ahead of training: a thread reads them, worker processes encode them."""

import dataclasses
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from upweight.data.sources.streams import Position, RawChunk
from upweight.data.workers import Chunk, EncodeJob, encode_chunk, jobs_of_process, lost_process, start_process
from upweight.heartbeat import activity

FEW_PROCESSES = 2  # where `dataset_num_proc` is unset
STOP_CHECK_SECONDS = 0.5


def _encode(number: int, rows: RawChunk) -> Chunk:
    return encode_chunk([dataclasses.replace(jobs_of_process[number], rows=rows)], 0, 0)


class EncodePool:
    """Processes that encode chunks of raw rows, each by the job of its source; they start with the first chunk."""

    def __init__(self, processes: int | None) -> None:
        self.jobs: list[EncodeJob] = []
        self.processes = processes or min(len(os.sched_getaffinity(0)), FEW_PROCESSES)
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()

    def add(self, job: EncodeJob) -> int:
        """Add a job before the first chunk is encoded; return its number."""
        assert self._pool is None, "the processes have the jobs that were there when they started"
        self.jobs.append(job)
        return len(self.jobs) - 1

    def submit(self, number: int, rows: RawChunk) -> "Future[Chunk]":
        """Have a chunk encoded by the job of this number."""
        with self._lock:
            if self._pool is None:  # forked processes get the jobs without their being pickled
                context = multiprocessing.get_context("fork")
                self._pool = ProcessPoolExecutor(self.processes, context, start_process, (tuple(self.jobs),))
            return self._pool.submit(_encode, number, rows)

    def close(self) -> None:
        """End the processes; a later chunk starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


class Encoded(NamedTuple):
    """A chunk of encoded rows, the position after it, and the number of rows read up to there."""

    chunk: Chunk
    position: Position
    read: int


Raw = Iterator[tuple[RawChunk, Position, int]]


class ReadAhead:
    """The encoded chunks of one pass over a stream, in order; at most `depth` of them wait to be taken."""

    def __init__(self, raw: Raw, submit: Callable[[RawChunk], "Future[Chunk]"], depth: int) -> None:
        self._waiting: queue.Queue[tuple[Future[Chunk], Position, int] | BaseException | None] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(raw, submit), daemon=True)
        self._thread.start()

    def take(self) -> Encoded | None:
        """Return the next chunk, or None after the last; an error of reading or encoding is raised here."""
        with activity("reading the training data"):
            waited = self._waiting.get()
            if waited is None or isinstance(waited, BaseException):
                self._waiting.put(waited)  # so that the next call returns or raises the same
                if waited is None:
                    return None
                raise waited
            future, position, read = waited
            try:
                return Encoded(future.result(), position, read)
            except BrokenProcessPool as error:
                raise lost_process() from error

    def stop(self) -> None:
        """Stop reading, and drop what was read."""
        self._stopped.set()
        self._thread.join()

    def _read(self, raw: Raw, submit: Callable[[RawChunk], "Future[Chunk]"]) -> None:
        try:
            for rows, position, read in raw:
                self._put((submit(rows), position, read))
                if self._stopped.is_set():
                    return
            self._put(None)
        except BaseException as error:  # raised again by who takes the chunks
            self._put(error)

    def _put(self, waiting: tuple[Future[Chunk], Position, int] | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                return self._waiting.put(waiting, timeout=STOP_CHECK_SECONDS)
            except queue.Full:
                continue
