"""What ranks exchange to change plans together: a thread of each rank, which alone calls the job's store for it.

Every rank reports what it has recorded of a window of steps. The job's first rank, which leads, gives all reports to a
search (``proposing.py``) and publishes its answer. Every rank reads it, makes the plans and counts itself as
ready. Some steps before each boundary the first rank publishes which answer holds from there on: the last one for which
all ranks were ready. So at a boundary no rank waits for a search, and none can miss a change.
"""

import json
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_pp.comm.stores import private_client
from megatron_pp.comm.transport import Transport
from megatron_pp.common.child_process import Child
from megatron_pp.features.replanning.proposing import Answer, Recorded, answer_in, content_of, searched
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.tracing import files
from megatron_pp.tracing.clock_sync import agree_on_clocks
from megatron_pp.tracing.recorder import Keeper

logger = logging.getLogger("megatron_pp")

_ROOT = "megatron_pp/replan"
# Seconds.
_POLL = 0.25  # for an answer; slower where thousands of ranks poll one store
_FAST = 0.005  # for a decision that is due
_AFTER_ERROR = 1.0
_JOIN = 5.0


class Window(Keeper):
    """The recorded steps of one window on one rank."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._plans: list[tuple[Plan, float]] = []
        self._steps: list[files.StepRecord] = []
        self._sync = self._header = ""

    def before(self, plan: Plan, size: float) -> int:
        """Compares the clocks, once. Collective over the pipeline."""
        if not self._sync:
            self._header = self._header_of(self.transport)
            self._sync = files.sync_line(self.clock(), agree_on_clocks(self.transport, self.clock).ahead)
        if all(known is not plan for known, _ in self._plans):
            self._plans.append((plan, size))
        return next(i for i, (known, _) in enumerate(self._plans) if known is plan)

    def keep(self, plan: Plan, record: files.StepRecord) -> None:
        self._steps.append(record)

    def text(self) -> str:
        """The trace of this rank; empty where no step was recorded. From any thread: the transport may be gone."""
        if not self._steps:
            return ""
        plans = [files.plan_line(plan, self.rank, size) for plan, size in self._plans]
        return "".join([self._header, *plans, self._sync, *map(files.step_line, self._steps)])

    @staticmethod
    def _header_of(transport: Transport) -> str:
        ranks = tuple(map(transport.global_rank, range(transport.size)))
        header = files.RunHeader("0", transport.rank, ranks, transport.device.type, socket.gethostname())
        return files.header_line(header)


class Change(NamedTuple):
    """A plan of an answer, on this rank. ``sentence``: from what to what; ``shares``: for which microbatches."""

    plan: Plan
    shares: tuple[float, ...]
    sentence: str


class ReplanThread:
    """Of one rank of a job of ``world`` ranks. ``rank``: in the job; number 0 leads. ``mine``: in its pipeline.
    ``forget_gone`` is called again and again: it closes exchanges whose model is gone, this one among them."""

    def __init__(
        self, store: Any, rank: int, world: int, mine: int, forget_gone: Callable[[], object] = lambda: None
    ) -> None:
        self.forget_gone = forget_gone
        self.rank, self.world, self.mine = rank, world, mine
        self.news = threading.Condition()
        self._changes: dict[int, list[Change]] = {}  # by the number of the answer
        self.stirred = False  # a step has begun since the store was last asked: at the end of a run it may be gone
        self._store = store
        self._prefix = ""
        self._outbox: list[tuple[int, Window, dict[str, Any]]] = []
        self._decided: dict[int, int] = {}
        self._due: int | None = None  # the boundary whose decision comes next
        self._read = 0  # answers
        self._closed = False
        self._said: set[str] = set()
        self._leads = _Leader(self) if rank == 0 else None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"megatron_pp replan {rank}")
        self._thread.start()

    def report(self, number: int, window: Window, more: dict[str, Any]) -> None:
        """Hand over what this rank has recorded, with ``more`` for JSON."""
        with self.news:
            self._outbox.append((number, window, more))
            self.news.notify_all()

    def expect(self, boundary: int) -> None:
        """From now on the decision for ``boundary`` is looked for, and made by the rank that leads."""
        with self.news:
            self._due = boundary
            self.news.notify_all()

    def decision(self, boundary: int, check: Callable[[], None]) -> int:
        """The number of the answer that holds from ``boundary`` on; 0: none. Waits for it, as long as ``check``, which
        is called in between, does not raise."""
        with self.news:
            while boundary not in self._decided:
                self.news.wait(4 * _FAST)
                check()
            return self._decided.pop(boundary)

    def taken(self, number: int) -> list[Change]:
        """The plans of an answer that was decided on; earlier ones are forgotten."""
        found = self._changes.pop(number)
        for earlier in [one for one in tuple(self._changes) if one < number]:
            del self._changes[earlier]
        return found

    def close(self) -> None:
        with self.news:
            self._closed = True
            self.news.notify_all()
        if self._leads is not None:
            self._leads.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning(text)

    def _run(self) -> None:
        pause = _POLL * max(1.0, self.world / 500)
        while not self._closed:
            self.forget_gone()
            try:
                if self.stirred or self._outbox or self._due is not None or (self._leads and self._leads.busy):
                    self.stirred = False
                    self._round()
                wait = pause if self._due is None else _FAST
            except Exception as error:  # whatever the store's client raises, or an answer that cannot be used
                if not self._closed:
                    self.say_once(f"pipeline_replan: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                wait = _AFTER_ERROR
            with self.news:
                if not self._closed and not self._outbox:
                    self.news.wait(wait)

    def _round(self) -> None:
        if not self._prefix:
            self._store = private_client(self._store)
            made = self._store.add(f"{_ROOT}/made/{self.rank}", 1)  # by all ranks as often, one after the other
            self._prefix = f"{_ROOT}/{made}"
        while self._outbox:
            number, window, more = self._outbox[0]
            report = {"window": number, "trace": window.text(), **more}
            self._store.set(self.key("report", self.rank), json.dumps(report))
            self._store.add(self.key("reports", number), 1)
            self._outbox.pop(0)
            if self._leads is not None:
                self._leads.window = number
        if self._leads is not None:
            self._leads.work(self._store, self._due)
        self._read_answer()
        due = self._due
        if due is not None and self._store.check([self.key("decision", due)]):
            number = int(self._store.get(self.key("decision", due)))
            with self.news:
                self._decided = {due: number}
                self._due = None if self._due == due else self._due
                self.news.notify_all()

    def _read_answer(self) -> None:
        number = self._read + 1
        if not self._store.check([self.key("answer", number)]):
            return
        text = self._store.get(self.key("answer", number))
        self._read = number  # one that cannot be used is passed over, and then not used by any rank
        self._changes[number] = self._made(answer_in(json.loads(text)))
        self._store.add(self.key("ready", number), 1)

    def _made(self, answer: Answer) -> list[Change]:
        made = [Change(proposal.plan(), proposal.shares, proposal.sentence) for proposal in answer.proposals]
        for change in made:
            change.plan.tasks(self.mine)
        return made

    def key(self, what: str, number: int) -> str:
        return f"{self._prefix}/{what}/{number}"


class _Leader:
    """What the job's first rank does in addition. ``window``: the last one that it has reported."""

    def __init__(self, thread: ReplanThread) -> None:
        self.thread = thread
        self.window = 0
        self._searched = 0  # the last window that was given to a search
        self._published = 0
        self._holds = 0
        self._decided = 0
        self._thread: threading.Thread | None = None
        self._child: Child | None = None
        self._answer: Answer | None = None

    @property
    def busy(self) -> bool:
        """Whether it waits for reports or an answer."""
        return self._thread is not None or self.window > self._searched

    def work(self, store: Any, due: int | None) -> None:
        if self._answer is not None:
            self._publish(store, self._answer)
        elif self._thread is None and self.window > self._searched:
            self._begin(store)
        if due is not None and due > self._decided:
            self._decide(store, due)

    def stop(self) -> None:
        if self._child is not None:
            self._child.process.kill()

    def _begin(self, store: Any) -> None:
        key, window, ranks = self.thread.key, self.window, range(self.thread.world)
        if store.add(key("reports", window), 0) < len(ranks):
            return
        self._searched = window
        reports = [json.loads(store.get(key("report", rank))) for rank in ranks]
        if any(report["window"] != window for report in reports):
            return  # overtaken
        recorded = Recorded(
            [report["trace"] for report in reports],
            reports[0]["splits"],
            any(report["draws"] for report in reports),
            [(), *reports[0]["shares"]],
        )
        self._thread = threading.Thread(target=self._search, args=(recorded,), daemon=True, name="megatron_pp search")
        self._thread.start()

    def _search(self, recorded: Recorded) -> None:
        """In a thread of its own, which waits for the process that searches."""
        try:
            self._answer = searched(recorded, self._note)
        except Exception as error:
            if not self.thread._closed:
                self.thread.say_once(f"pipeline_replan: no plan was searched, and the present one stays: {error}")
            self._answer = Answer([], [])
        self._child = None

    def _note(self, child: Child) -> None:
        self._child = child

    def _publish(self, store: Any, answer: Answer) -> None:
        self._answer = self._thread = None
        for shares, why in answer.kept:
            of = f" for microbatches that take {', '.join(map('{:g}'.format, shares))}" if shares else ""
            logger.info("pipeline_replan: the plan stays%s: %s", of, why)
        if answer.proposals:
            self._published += 1
            store.set(self.thread.key("answer", self._published), json.dumps(content_of(answer)))

    def _decide(self, store: Any, boundary: int) -> None:
        key, ready = self.thread.key, self._holds
        for number in range(self._holds + 1, self._published + 1):
            if store.add(key("ready", number), 0) == self.thread.world:
                ready = number
        self._holds, self._decided = ready, boundary
        store.set(key("decision", boundary), str(ready))
