"""What asks before anything is done: it shows what would come of it, as things are now."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from sqlsem.insight.consequences import Action, Consequence, consequence
from sqlsem.insight.overview import Overview
from sqlsem.model import MAX_INT

__all__ = ["AskCap", "Confirm", "Dialog", "Help"]

HELP = """\
1 to 7, Tab     another view: queues, block leaders, members,
                work queues, batches, times, rates
arrows, j, k    move; Page up and down, Home, End
/               only rows that have all these words in them
                (Enter keeps them, Escape takes them away)
s, S            sort by the next column, by the one before
Space           freeze what you see, go on
p, r            pause the resource, resume it
c               cap the resource, or lift its cap
x, X            revoke the request: its holder is told, and has
                its grace to stop; X does not wait for it
t               retry the failed task that holds its queue up
q, Ctrl-C       end

Whatever changes something shows first what would come of it,
and is done only when you say y.

Any key goes back."""


class Dialog(ModalScreen[Action | None]):
    """A box in the middle; what it says follows what is seen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "No", show=False)]

    def __init__(self, overview: Overview, action: Action) -> None:
        super().__init__()
        self.overview = overview
        self.wanted: Action | None = action
        self.told: Consequence | None = None

    def action_leave(self) -> None:
        """Nothing is done."""
        self.dismiss(None)

    def on_mount(self) -> None:
        """Say it for the first time."""
        self.follow(self.overview)

    def follow(self, overview: Overview) -> None:
        """Say what would come of it now."""
        self.overview = overview
        self.told = None if self.wanted is None else consequence(overview, self.wanted)
        self.query_one("#told", Static).update(self.words())

    def words(self) -> Text:
        """What it says."""
        told = self.told
        if told is None:
            return Text("A cap is a whole number from 1; leave it empty to lift the cap.")
        text = Text(told.question, style="bold")
        for line in told.lines:
            text.append(f"\n\n{line}", style="not bold")
        if told.possible:
            text.append(f"\n\nThe same as: {told.action.command}", style="not bold dim")
        return text


class Confirm(Dialog):
    """Asks whether to do something; what it returns is done."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "agree", "Yes", show=False),
        Binding("n,enter,q", "leave", "No", show=False),
    ]

    def compose(self) -> ComposeResult:
        """The box."""
        with Vertical(classes="box"):
            with VerticalScroll(can_focus=False):
                yield Static(id="told")
            yield Static(id="keys")

    def follow(self, overview: Overview) -> None:
        """Say what would come of it now, and whether it can be."""
        super().follow(overview)
        possible = self.told is not None and self.told.possible
        self.query_one("#keys", Static).update("y  yes, do it     n  no" if possible else "n  back")

    def action_agree(self) -> None:
        """Do it, if it can be done as things are."""
        if self.told is not None and self.told.possible:
            self.dismiss(self.wanted)


class AskCap(Dialog):
    """Asks for a cap, and says what would come of the one that stands there; it is confirmed afterwards."""

    def __init__(self, overview: Overview, resource: str, cap: int | None) -> None:
        super().__init__(overview, Action("uncap", resource=resource))
        self._resource = resource
        self._cap = cap

    def compose(self) -> ComposeResult:
        """The box."""
        with Vertical(classes="box"):
            yield Static("Never more than (leave it empty to lift the cap):")
            yield Input("" if self._cap is None else str(self._cap), id="cap", max_length=10)
            with VerticalScroll(can_focus=False):
                yield Static(id="told")
            yield Static("Enter  go on     Escape  back", id="keys")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Another cap, other consequences."""
        text = event.value.strip()
        if not text:
            self.wanted = Action("uncap", resource=self._resource)
        elif text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_INT:
            self.wanted = Action("cap", resource=self._resource, cap=int(text))
        else:
            self.wanted = None
        self.follow(self.overview)

    def on_input_submitted(self) -> None:
        """Go on to be asked."""
        if self.told is not None and self.told.possible:
            self.dismiss(self.wanted)


class Help(ModalScreen[None]):
    """The keys."""

    def compose(self) -> ComposeResult:
        """The box."""
        with Vertical(classes="box"):
            yield Static(HELP)

    def on_key(self) -> None:
        """Back."""
        self.dismiss(None)
