"""The program on the terminal: one screen, the views on it, and what is asked before anything is done."""

from __future__ import annotations

from typing import ClassVar, Literal

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input, Static

from sqlsem.errors import SqlsemError
from sqlsem.insight.board import ORDER, VIEWS, listing, offered_views, summary
from sqlsem.insight.consequences import Action, Kind
from sqlsem.insight.words import seconds_in_words
from sqlsem.live import Live, Seen, in_a_line
from sqlsem.printable import clean
from sqlsem.tui.dialogs import AskCap, Confirm, Dialog, Help
from sqlsem.tui.grid import Grid

__all__ = ["Top"]

KEYS = "1-7 view  / filter  s sort  p pause  r resume  c cap  x revoke  t retry  ? help"


class Top(App[None]):
    """``sqlsem top``. ``live`` must not have been started; it is stopped at the end."""

    CSS_PATH = "top.tcss"
    ENABLE_COMMAND_PALETTE = False
    SCREENS: ClassVar[dict[str, type[Help]]] = {"help": Help}  # type: ignore[assignment]
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"view('{key}')", show=False) for number, key in enumerate(VIEWS, 1)),
        Binding("tab", "next_view(1)", show=False, priority=True),
        Binding("shift+tab", "next_view(-1)", show=False, priority=True),
        Binding("slash", "filter", show=False),
        Binding("s", "sort(1)", show=False),
        Binding("S", "sort(-1)", show=False),
        Binding("space", "freeze", show=False),
        Binding("p", "ask('pause')", show=False),
        Binding("r", "ask('resume')", show=False),
        Binding("c", "cap", show=False),
        Binding("x", "ask('revoke')", show=False),
        Binding("X", "ask('revoke_now')", show=False),
        Binding("t", "ask('retry')", show=False),
        Binding("question_mark,f1", "push_screen('help')", show=False),
        Binding("q,ctrl+c", "quit", show=False, priority=False),
    ]

    class Looked(Message):
        """There has been a look."""

        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.seen = seen

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live
        self._seen = Seen()  # what is shown: not the last look while frozen
        self._frozen = False
        self._view = next(iter(VIEWS))
        self._sorts = dict.fromkeys(VIEWS, ORDER)
        self._wanted = ""

    def compose(self) -> ComposeResult:
        """The screen, from top to bottom."""
        yield Static(id="title")
        yield Static(id="state")
        yield Static(id="views")
        yield Grid()
        yield Static(id="details")
        yield Static(KEYS, id="keys-line")
        yield Input(id="words", placeholder="only rows with all of these words in them")

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(Grid).focus()
        self._show(self._live.seen)
        self._live.start(self._tell)

    def _tell(self, seen: Seen) -> None:
        self.post_message(self.Looked(seen))

    def on_unmount(self) -> None:
        """Look no more."""
        self._live.stop()

    # -- showing ------------------------------------------------------------------------------------------------

    def on_top_looked(self, message: Looked) -> None:
        """Show what was seen, and what would come now of what is being asked."""
        seen = message.seen
        if isinstance(self.screen, Dialog) and seen.overview is not None:
            self.screen.follow(seen.overview)
        if not self._frozen:
            self._show(seen)

    def _show(self, seen: Seen) -> None:
        self._seen = seen
        self._tell_state()
        self._fill()

    def _fill(self, *, afresh: bool = False) -> None:
        """The view, as it is sorted and filtered."""
        if self._seen.overview is not None:
            found = listing(self._seen.overview, self._seen.why, self._view, self._sorts[self._view], self._wanted)
            self._part(Grid).show(found, afresh=afresh)
            count = f"{found.shown} of {found.total}" if self._wanted else str(found.total)
            self._tell_views(count)

    def _part(self, kind: type[Grid]) -> Grid:
        return self.screen_stack[0].query_one(kind)

    def _write(self, place: str, text: Text | str) -> None:
        self.screen_stack[0].query_one(place, Static).update(text)

    def _tell_state(self) -> None:
        seen = self._seen
        rights = seen.rights
        marks = "  READ-ONLY" if rights is not None and not rights else ""
        at = "" if seen.overview is None else f"  {seen.overview.taken_at.astimezone():%H:%M:%S}"
        frozen = "  FROZEN" if self._frozen else ""
        title = f"sqlsem top{at}{frozen}{marks}  {clean(self._live.where)}"
        self._write("#title", Text(title, no_wrap=True, overflow="ellipsis"))
        state = self.screen_stack[0].query_one("#state", Static)
        state.set_class(seen.down_since is not None, "down")
        if seen.down_since is not None:
            state.update(Text(outage(seen, self._live.every)))
        elif seen.overview is not None:
            state.update(Text(summary(seen.overview)))

    def _tell_views(self, count: str) -> None:
        text = Text(no_wrap=True, overflow="ellipsis")
        after = " "  # the one before
        for number, view in enumerate(offered_views(self._seen.overview, self._view), 1):
            here = view.key == self._view
            text.append("[" if here else after, "bold")
            text.append(f"{number} {view.title}", "bold" if here else "dim")
            after = "]" if here else " "
        text.append(after, "bold")
        sort = self._sorts[self._view]
        notes = [count]
        if sort != ORDER:
            column = next(one for one in VIEWS[self._view].columns if one.key == sort)
            notes.append(f"by {column.head}")
        if self._wanted:
            notes.append(f"/{clean(self._wanted)}")
        text.append(f"  {'  '.join(notes)}")
        self._write("#views", text)

    def on_grid_moved(self) -> None:
        """Say all about the row under the cursor."""
        row = self._part(Grid).row
        self._write("#details", Text("\n".join(row.details if row is not None else ())))

    # -- looking around -----------------------------------------------------------------------------------------

    def action_view(self, key: str) -> None:
        """Another view."""
        self._view = key
        self._fill(afresh=True)

    def action_next_view(self, by: int) -> None:
        """The next one."""
        keys = [view.key for view in offered_views(self._seen.overview, self._view)]
        if len(self.screen_stack) == 1:
            self.action_view(keys[(keys.index(self._view) + by) % len(keys)])

    def action_sort(self, by: int) -> None:
        """By the next column."""
        sorts = VIEWS[self._view].sorts
        self._sorts[self._view] = sorts[(sorts.index(self._sorts[self._view]) + by) % len(sorts)]
        self._fill()

    def action_freeze(self) -> None:
        """Show nothing new; or go on."""
        self._frozen = not self._frozen
        self._show(self._seen if self._frozen else self._live.seen)

    def action_filter(self) -> None:
        """Ask for words."""
        self.screen.add_class("filtering")
        self.query_one("#words", Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter as one types."""
        if event.input.id == "words":
            self._wanted = event.value
            self._fill()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Back to the table."""
        if event.input.id == "words":
            self._end_filter()

    def key_escape(self) -> None:
        """Without words again."""
        if len(self.screen_stack) == 1:
            self.query_one("#words", Input).value = ""
            self._end_filter()

    def _end_filter(self) -> None:
        self.screen.remove_class("filtering")
        self.query_one(Grid).focus()

    # -- changing -----------------------------------------------------------------------------------------------

    def action_ask(self, kind: Kind) -> None:
        """Ask whether to do something with what the cursor stands on."""
        row = self._part(Grid).row
        if row is None or kind not in row.actions:
            self._answer(_why_not(kind), failed=True)
            return
        self._ask(Action(kind, resource=row.resource, position=row.position, task_id=row.task_id))

    def action_cap(self) -> None:
        """Ask for a cap."""
        row = self._part(Grid).row
        overview = self._live.seen.overview
        if row is None or row.resource is None or "cap" not in row.actions or overview is None:
            self._answer(_why_not("cap"), failed=True)
            return
        if self._refused(Action("cap", resource=row.resource)):
            return
        cap = next((one.cap for one in overview.resources if one.resource == row.resource), None)
        self.push_screen(AskCap(overview, row.resource, cap), lambda action: self._ask(action) if action else None)

    def _ask(self, action: Action) -> None:
        overview = self._live.seen.overview
        if overview is not None and not self._refused(action):
            self.push_screen(Confirm(overview, action), lambda agreed: self._do(agreed) if agreed else None)

    def _refused(self, action: Action) -> bool:
        refusal = self._live.refusal(action)
        if refusal is not None:
            self._answer(refusal, failed=True)
        return refusal is not None

    def _do(self, action: Action) -> None:
        def work() -> None:
            try:
                told, failed = self._live.perform(action), False
            except SqlsemError as exc:
                told, failed = in_a_line(exc), True
            self.call_from_thread(self._answer, told, failed=failed)

        self.run_worker(work, thread=True)

    def _answer(self, text: str, *, failed: bool) -> None:
        severity: Literal["error", "information"] = "error" if failed else "information"
        self.notify(clean(text), severity=severity, markup=False, timeout=10 if failed else 5)


def outage(seen: Seen, every: float) -> str:
    """Since when nothing has been seen, why, and what is done about it."""
    assert seen.down_since is not None
    shown = "" if seen.at is None else f" What you see is of {seen.at:%H:%M:%S}."
    return (
        f"NOTHING SEEN since {seen.down_since:%H:%M:%S}; looking again every {seconds_in_words(every)}.{shown} "
        f"{seen.trouble}"
    )


def _why_not(kind: Kind) -> str:
    """What the cursor has to stand on."""
    return {
        "pause": "There is no resource under the cursor that could be paused.",
        "resume": "There is no resource under the cursor that is paused.",
        "cap": "There is no resource under the cursor that could be capped.",
        "uncap": "There is no resource under the cursor that is capped.",
        "revoke": "There is no request under the cursor that could be revoked.",
        "revoke_now": "There is no request under the cursor that could be revoked.",
        "retry": "There is no queue under the cursor that a failed task holds up (view 4).",
    }[kind]
