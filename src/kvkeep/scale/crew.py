"""Workers on a cluster of Ray, and the lines of a job on their way through them.

The driver hands each worker a few lines more than it has rows, and takes the answers as they come. A worker that dies
is replaced, and its lines run again. The driver alone knows which lines are done, so that no answer counts twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from kvkeep.errors import InputError
from kvkeep.jobs.survey import Shape
from kvkeep.scale.cluster import Need, last_words, need_ray
from kvkeep.scale.lost import LostClusterError, check_alive
from kvkeep.scale.place import Item, Place
from kvkeep.scale.worker import Answer, Facts, Layout, Make, Worker

Stopped: TypeAlias = Callable[[], bool]

DEATHS = 3
"""Deaths of a worker without an answer in between, after which its place stays empty."""
SUSPECT = 2
"""Deaths of its worker after which a line waits for the end of the job, and then runs alone."""
GUILTY = 2
"""Deaths of a worker that ran a line alone, after which the line has failed."""
_PATIENCE_S = 0.5
_SLOW = 40  # waits without a worker, after which the user is told
_LOST = 8  # waits without a worker, after which the cluster is asked for
_MOST_AT_ONCE = 4096


class Crew:
    """Some workers with an engine each.

    Args:
        make: makes the engine of a worker.
        size: the number of workers.
        need: what each takes.
        like: how the first worker lays out the weights; it chooses by speed if this is left out.
        tell: prints a note for the user.

    Attributes:
        size: the number of workers.
    """

    def __init__(
        self,
        make: Make,
        size: int,
        need: Need,
        *,
        like: Layout | None = None,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._ray, self._make, self._like, self._tell = need_ray(), make, like, tell
        options: dict[str, Any] = {"num_cpus": need.cpus, "num_gpus": need.gpus, "max_concurrency": _MOST_AT_ONCE}
        options |= {"memory": need.memory} if need.memory else {}
        self._remote = self._ray.remote(Worker).options(**options, max_restarts=0, max_task_retries=0)
        self._places = [Place(number) for number in range(1, size + 1)]
        self._again: deque[Item] = deque()
        self._suspects: deque[Item] = deque()
        self._died: Counter[int] = Counter()
        self._died_alone: Counter[int] = Counter()
        self._facts: Facts | None = None
        self._lost = False
        self.size = size

    @property
    def facts(self) -> Facts:
        """What the workers say of themselves; all say the same of weights and rows."""
        assert self._facts is not None
        return self._facts

    def begin(self, stopped: Stopped = lambda: False) -> None:
        """Start all workers and wait for their engines, unless the user wants to stop.

        Raises:
            InputError: a worker cannot make its engine, dies, or has other weights than the others.
        """
        first, *others = self._places
        self._await([first], stopped)
        self._await(others, stopped)  # they lay out the weights as the first one has

    def _await(self, places: Sequence[Place], stopped: Stopped) -> None:
        """Start workers and wait for their engines."""
        if stopped():
            return
        for place in places:
            self._hire(place)
        waits = 0
        while (waiting := [place for place in places if place.starting is not None]) and not stopped():
            ready, _ = self._ray.wait([place.starting for place in waiting], timeout=_PATIENCE_S)
            waits += 1
            if waits % _SLOW == 0:
                self._tell(f"waiting for {len(waiting)} of {len(self._places)} workers to start")
            for place in [place for place in waiting if place.starting in ready]:
                try:
                    problem = self._welcome(place, self._ray.get(place.starting))
                except Exception as error:
                    raise InputError(
                        f"Worker {place.number} died while it made its engine: {last_words(error)}."
                    ) from error
                if problem:
                    raise InputError(problem)

    def judge(self, shapes: Sequence[Shape]) -> Sequence[str | None]:
        """Why the engines refuse requests of each shape, see `kvkeep.jobs.survey.Judge`.

        Raises:
            InputError: the worker that was asked dies.
        """
        try:
            verdicts: Sequence[str | None] = self._ray.get(self._places[0].handle.judge.remote(list(shapes)))
        except Exception as error:
            raise InputError(
                f"Worker {self._places[0].number} died while it checked lines: {last_words(error)}."
            ) from error
        return verdicts

    def run(
        self,
        lines: Iterator[Item],
        made_by: Mapping[str, Any],
        take: Callable[[Answer], object],
        stopped: Stopped = lambda: False,
    ) -> None:
        """Run lines to their ends, or until the user wants to stop.

        Args:
            lines: the lines, which are read as workers become free.
            made_by: the settings of the job.
            take: gets the answer of each line once, in any order.
            stopped: whether the user wants to stop.

        Raises:
            InputError: no worker is left.
            LostClusterError: the cluster has gone away.
        """
        waits = 0
        while not stopped():
            self._feed(lines, made_by)
            running = [reference for place in self._places for reference in place.running]
            if not running and not self._again and not self._suspects:
                if (item := next(lines, None)) is None:
                    return
                self._again.append(item)
            if all(place.handle is None for place in self._places):
                raise InputError(
                    f"No worker is left: each died {DEATHS} times without an answer. Perhaps they need more than their "
                    "nodes have; the nodes' logs of Ray say why. The same command goes on from here."
                )
            starting = [place.starting for place in self._places if place.starting is not None]
            ready, rest = self._ray.wait(running + starting, timeout=_PATIENCE_S)
            more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0) if ready and rest else ([], [])
            waits = 0 if running or ready else waits + 1
            self._tell_of(waits)
            self._collect({*ready, *more}, take)

    def _tell_of(self, waits: int) -> None:
        """Say that nothing comes, after so many waits in which no worker ran, or from workers that have a line.

        Raises:
            LostClusterError: the cluster has gone away.
        """
        if waits and waits % _LOST == 0:
            self._check_alive()
        if waits and waits % _SLOW == 0:
            self._tell("no worker runs; waiting for the cluster to start one")
        for silence in filter(None, [place.silence() for place in self._places]):
            self._tell(silence)

    def close(self) -> None:
        """End all workers, unless the cluster has gone away."""
        for place in self._places if not self._lost else ():
            self._dismiss(place)

    def _check_alive(self) -> None:
        try:
            check_alive(self._ray)
        except LostClusterError:
            self._lost = True
            raise

    def _hire(self, place: Place) -> None:
        place.handle = self._remote.remote(self._make)
        place.starting = place.handle.begin.remote(self._like if self._facts is None else self._facts.layout)

    def _dismiss(self, place: Place) -> None:
        if place.handle is not None:
            with suppress(Exception):  # it is gone, or the cluster is
                self._ray.kill(place.handle, no_restart=True)
        place.handle = place.starting = None
        place.alone = False
        place.running.clear()

    def _welcome(self, place: Place, said: Facts | str) -> str | None:
        """Take the facts of a new worker; return what is wrong with it."""
        if isinstance(said, str):
            return said
        known = self._facts = self._facts or said
        if said.weights != known.weights:
            return (
                f"Workers have different weights under one name: those on {said.host} are not those on {known.host}. "
                "Give every node the same files."
            )
        place.starting, place.facts = None, said
        return None

    def _feed(self, lines: Iterator[Item], made_by: Mapping[str, Any]) -> None:
        """Hand lines to the workers with the fewest, as long as one has less than it should have."""
        most = self.facts.rows + max(2, self.facts.rows // 2)
        while free := [
            place
            for place in self._places
            if place.handle is not None and place.starting is None and not place.alone and len(place.running) < most
        ]:
            place = min(free, key=lambda one: len(one.running))
            item = self._again.popleft() if self._again else next(lines, None)
            if item is None and self._suspects and not place.running:
                item, place.alone = self._suspects.popleft(), True
            if item is None:
                return
            if not place.running:
                place.hear()
            place.running[place.handle.run.remote(*item, made_by)] = item

    def _collect(self, ready: set[Any], take: Callable[[Answer], object]) -> None:
        """Take what has come: answers, facts of new workers, deaths."""
        for place in self._places:
            for reference in [one for one in (place.starting, *place.running) if one is not None and one in ready]:
                if reference is not place.starting and reference not in place.running:
                    break  # its worker was found dead before
                try:
                    said = self._ray.get(reference)
                except Exception as error:
                    self._replace(place, last_words(error), take)
                    break
                if reference is place.starting:
                    if problem := self._welcome(place, said):
                        self._dismiss(place)
                        self._tell(f"worker {place.number} is given up: {problem}")
                else:
                    del place.running[reference]
                    place.deaths, place.alone = 0, False
                    place.hear()
                    take(said)

    def _replace(self, place: Place, reason: str, take: Callable[[Answer], object]) -> None:
        """Start a worker in place of a dead one, and give its lines back."""
        lost, alone = list(place.running.values()), place.alone
        finished = self._finished(place, take)
        self._dismiss(place)
        lost = [item for item in lost if item[0] not in finished]
        for item in lost:
            self._give_back(item, alone=alone, take=take)
        place.deaths += 0 if alone else 1
        again = f"; {len(lost)} of its lines run again" if lost else ""
        if place.deaths >= DEATHS:
            self._tell(f"worker {place.number} is given up after {DEATHS} deaths without an answer{again}: {reason}")
            return
        self._tell(f"worker {place.number} died and is replaced{again}: {reason}")
        self._hire(place)

    def _finished(self, place: Place, take: Callable[[Answer], object]) -> set[int]:
        """Take the answers that a worker gave before it died; return their lines' numbers."""
        found = set()
        ready = (
            self._ray.wait(list(place.running), num_returns=len(place.running), timeout=0)[0] if place.running else []
        )
        for reference in ready:
            try:
                said = self._ray.get(reference)
            except Exception:  # it died before this answer
                continue
            found.add(place.running.pop(reference)[0])
            place.deaths = 0
            take(said)
        return found

    def _give_back(self, item: Item, *, alone: bool, take: Callable[[Answer], object]) -> None:
        """Queue a line of a dead worker again; a line that has killed workers all alone has failed."""
        number = item[0]
        self._died[number] += 1
        self._died_alone[number] += alone
        if self._died_alone[number] >= GUILTY:
            take(Answer(number, reason=f"its worker died {self._died[number]} times"))
        elif self._died[number] >= SUSPECT:
            self._suspects.append(item)
        else:
            self._again.append(item)
