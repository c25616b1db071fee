"""The Textual application of `sqlsem top`: one screen with its views. Every change is confirmed in a dialog."""

from __future__ import annotations

from typing import ClassVar, Literal

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input, Static

from sqlsem.insight.board import ORDER, VIEWS, listing, offered_views, summary
from sqlsem.insight.consequences import Action, Kind
from sqlsem.insight.words import seconds_in_words
from sqlsem.ops.poller import Poller, Snapshot, one_line
from sqlsem.ops.tui.dialogs import AskCap, Confirm, Dialog, Help
from sqlsem.ops.tui.grid import Grid
from sqlsem.util.printable import clean
from sqlsem.values.errors import SqlsemError

__all__ = ["Top"]

KEYS = "1-7 view  / filter  s sort  p pause  r resume  c cap  x revoke  t retry  ? help"


class Top(App[None]):
    """``sqlsem top``. It starts ``poller``, and stops it at the end."""

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

    class Polled(Message):
        """A poll has ended."""

        def __init__(self, snapshot: Snapshot) -> None:
            super().__init__()
            self.snapshot = snapshot

    def __init__(self, poller: Poller) -> None:
        super().__init__()
        self._poller = poller
        self._snapshot = Snapshot()  # the one that is shown: not the last one while frozen
        self._frozen = False
        self._view = next(iter(VIEWS))
        self._sorts = dict.fromkeys(VIEWS, ORDER)
        self._filter = ""

    def compose(self) -> ComposeResult:
        """Yield the widgets of the screen, from top to bottom."""
        yield Static(id="title")
        yield Static(id="state")
        yield Static(id="views")
        yield Grid()
        yield Static(id="details")
        yield Static(KEYS, id="keys-line")
        yield Input(id="words", placeholder="only rows with all of these words in them")

    def on_mount(self) -> None:
        """Start to poll."""
        self.query_one(Grid).focus()
        self._show(self._poller.snapshot)
        self._poller.start(self._on_snapshot)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self.post_message(self.Polled(snapshot))

    def on_unmount(self) -> None:
        """Stop polling."""
        self._poller.stop()

    # -- showing ------------------------------------------------------------------------------------------------

    def on_top_polled(self, message: Polled) -> None:
        """Show the new snapshot, also in an open dialog."""
        snapshot = message.snapshot
        if isinstance(self.screen, Dialog) and snapshot.overview is not None:
            self.screen.update_overview(snapshot.overview)
        if not self._frozen:
            self._show(snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._show_state()
        self._fill()

    def _fill(self, *, new_view: bool = False) -> None:
        """Show the rows of the view, sorted and filtered."""
        if self._snapshot.overview is not None:
            rows = listing(
                self._snapshot.overview, self._snapshot.why, self._view, self._sorts[self._view], self._filter
            )
            self._grid.show(rows, new_view=new_view)
            self._show_views(f"{rows.shown} of {rows.total}" if self._filter else str(rows.total))

    @property
    def _grid(self) -> Grid:
        return self.screen_stack[0].query_one(Grid)

    def _write(self, selector: str, text: Text | str) -> None:
        self.screen_stack[0].query_one(selector, Static).update(text)

    def _show_state(self) -> None:
        snapshot = self._snapshot
        rights = snapshot.rights
        marks = "  READ-ONLY" if rights is not None and not rights else ""
        at = "" if snapshot.overview is None else f"  {snapshot.overview.taken_at.astimezone():%H:%M:%S}"
        frozen = "  FROZEN" if self._frozen else ""
        title = f"sqlsem top{at}{frozen}{marks}  {clean(self._poller.where)}"
        self._write("#title", Text(title, no_wrap=True, overflow="ellipsis"))
        state = self.screen_stack[0].query_one("#state", Static)
        state.set_class(snapshot.down_since is not None, "down")
        if snapshot.down_since is not None:
            state.update(Text(outage(snapshot, self._poller.every)))
        elif snapshot.overview is not None:
            state.update(Text(summary(snapshot.overview)))

    def _show_views(self, count: str) -> None:
        text = Text(no_wrap=True, overflow="ellipsis")
        separator = " "
        for number, view in enumerate(offered_views(self._snapshot.overview, self._view), 1):
            is_current = view.key == self._view
            text.append("[" if is_current else separator, "bold")
            text.append(f"{number} {view.title}", "bold" if is_current else "dim")
            separator = "]" if is_current else " "
        text.append(separator, "bold")
        sort = self._sorts[self._view]
        notes = [count]
        if sort != ORDER:
            column = next(column for column in VIEWS[self._view].columns if column.key == sort)
            notes.append(f"by {column.head}")
        if self._filter:
            notes.append(f"/{clean(self._filter)}")
        text.append(f" {'  '.join(notes)}")
        self._write("#views", text)

    def on_grid_moved(self) -> None:
        """Show the details of the row under the cursor."""
        row = self._grid.row
        self._write("#details", Text("\n".join(row.details if row is not None else ())))

    # -- navigation ---------------------------------------------------------------------------------------------

    def action_view(self, key: str) -> None:
        """Show another view."""
        self._view = key
        self._fill(new_view=True)

    def action_next_view(self, by: int) -> None:
        """Show the next view, or the previous one."""
        keys = [view.key for view in offered_views(self._snapshot.overview, self._view)]
        if len(self.screen_stack) == 1:
            self.action_view(keys[(keys.index(self._view) + by) % len(keys)])

    def action_sort(self, by: int) -> None:
        """Sort by the next column, or by the previous one."""
        sorts = VIEWS[self._view].sorts
        self._sorts[self._view] = sorts[(sorts.index(self._sorts[self._view]) + by) % len(sorts)]
        self._fill()

    def action_freeze(self) -> None:
        """Freeze the shown snapshot, or unfreeze."""
        self._frozen = not self._frozen
        self._show(self._snapshot if self._frozen else self._poller.snapshot)

    def action_filter(self) -> None:
        """Show the input for the filter."""
        self.screen.add_class("filtering")
        self.query_one("#words", Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        if event.input.id == "words":
            self._filter = event.value
            self._fill()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go back to the table."""
        if event.input.id == "words":
            self._end_filter()

    def key_escape(self) -> None:
        """Remove the filter."""
        if len(self.screen_stack) == 1:
            self.query_one("#words", Input).value = ""
            self._end_filter()

    def _end_filter(self) -> None:
        self.screen.remove_class("filtering")
        self.query_one(Grid).focus()

    # -- actions ------------------------------------------------------------------------------------------------

    def action_ask(self, kind: Kind) -> None:
        """Ask whether to perform an action on the row under the cursor."""
        row = self._grid.row
        if row is None or kind not in row.actions:
            self._notify(_why_not(kind), failed=True)
            return
        self._ask(Action(kind, resource=row.resource, position=row.position, task_id=row.task_id))

    def action_cap(self) -> None:
        """Ask for a cap."""
        row = self._grid.row
        overview = self._poller.snapshot.overview
        if row is None or row.resource is None or "cap" not in row.actions or overview is None:
            self._notify(_why_not("cap"), failed=True)
            return
        if self._refused(Action("cap", resource=row.resource)):
            return
        cap = next((resource.cap for resource in overview.resources if resource.resource == row.resource), None)
        self.push_screen(AskCap(overview, row.resource, cap), lambda action: self._ask(action) if action else None)

    def _ask(self, action: Action) -> None:
        overview = self._poller.snapshot.overview
        if overview is not None and not self._refused(action):
            self.push_screen(Confirm(overview, action), lambda agreed: self._do(agreed) if agreed else None)

    def _refused(self, action: Action) -> bool:
        refusal = self._poller.refusal(action)
        if refusal is not None:
            self._notify(refusal, failed=True)
        return refusal is not None

    def _do(self, action: Action) -> None:
        def work() -> None:
            try:
                message, failed = self._poller.perform(action), False
            except SqlsemError as exc:
                message, failed = one_line(exc), True
            self.call_from_thread(self._notify, message, failed=failed)

        self.run_worker(work, thread=True)

    def _notify(self, text: str, *, failed: bool) -> None:
        severity: Literal["error", "information"] = "error" if failed else "information"
        self.notify(clean(text), severity=severity, markup=False, timeout=10 if failed else 5)


def outage(snapshot: Snapshot, every: float) -> str:
    """Return the message about an outage: its start, the time of the shown data, and the error."""
    assert snapshot.down_since is not None
    shown = "" if snapshot.at is None else f" The data below is of {snapshot.at:%H:%M:%S}."
    return (
        f"NO ANSWER since {snapshot.down_since:%H:%M:%S}; trying again every {seconds_in_words(every)}.{shown} "
        f"{snapshot.trouble}"
    )


def _why_not(kind: Kind) -> str:
    """Return why the action is not possible on the row under the cursor."""
    return {
        "pause": "There is no resource under the cursor that could be paused.",
        "resume": "There is no resource under the cursor that is paused.",
        "cap": "There is no resource under the cursor that could be capped.",
        "uncap": "There is no resource under the cursor that is capped.",
        "revoke": "There is no request under the cursor that could be revoked.",
        "revoke_now": "There is no request under the cursor that could be revoked.",
        "retry": "There is no queue under the cursor that a failed task holds up (view 4).",
    }[kind]
