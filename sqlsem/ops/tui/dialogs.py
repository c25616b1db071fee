"""Dialogs that confirm an action: each shows the consequences that the action would have now."""

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
from sqlsem.values.locks import MAX_INT

__all__ = ["AskCap", "Confirm", "Dialog", "Help"]

HELP = """\
1 to 7, Tab     another view: queues, root blockers, members,
                work queues, batches, times, rates
arrows, j, k    move; Page up and down, Home, End
/               only rows that have all these words in them
                (Enter keeps the filter, Escape removes it)
s, S            sort by the next column, by the one before
Space           freeze the screen, unfreeze it
p, r            pause the resource, resume it
c               cap the resource, or lift its cap
x, X            revoke the request: its holder is notified, and
                has its grace to stop; X does not wait for it
t               retry the failed task that holds its queue up
q, Ctrl-C       quit

Every action first shows its consequences, and is performed
only when you press y.

Any key goes back."""


class Dialog(ModalScreen[Action | None]):
    """A box in the middle of the screen; its text is updated after each poll."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "No", show=False)]

    def __init__(self, overview: Overview, action: Action) -> None:
        super().__init__()
        self.overview = overview
        self.action: Action | None = action
        self.consequence: Consequence | None = None

    def action_leave(self) -> None:
        """Close the dialog without an action."""
        self.dismiss(None)

    def on_mount(self) -> None:
        """Show the consequences."""
        self.update_overview(self.overview)

    def update_overview(self, overview: Overview) -> None:
        """Show the consequences that the action would have now."""
        self.overview = overview
        self.consequence = None if self.action is None else consequence(overview, self.action)
        self.query_one("#consequence", Static).update(self.text())

    def text(self) -> Text:
        """Return the text of the dialog."""
        result = self.consequence
        if result is None:
            return Text("A cap is a whole number from 1; leave it empty to lift the cap.")
        text = Text(result.question, style="bold")
        for line in result.lines:
            text.append(f"\n\n{line}", style="not bold")
        if result.possible:
            text.append(f"\n\nThe same as: {result.action.command}", style="not bold dim")
        return text


class Confirm(Dialog):
    """Asks whether to perform an action; returns it if the user agrees."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "agree", "Yes", show=False),
        Binding("n,enter,q", "leave", "No", show=False),
    ]

    def compose(self) -> ComposeResult:
        """Yield the widgets of the box."""
        with Vertical(classes="box"):
            with VerticalScroll(can_focus=False):
                yield Static(id="consequence")
            yield Static(id="keys")

    def update_overview(self, overview: Overview) -> None:
        """Show the consequences, and the keys for an action that is possible."""
        super().update_overview(overview)
        possible = self.consequence is not None and self.consequence.possible
        self.query_one("#keys", Static).update("y  yes, do it     n  no" if possible else "n  back")

    def action_agree(self) -> None:
        """Return the action, if it is possible now."""
        if self.consequence is not None and self.consequence.possible:
            self.dismiss(self.action)


class AskCap(Dialog):
    """Asks for a cap, and shows its consequences while the user types. `Confirm` follows."""

    def __init__(self, overview: Overview, resource: str, cap: int | None) -> None:
        super().__init__(overview, Action("uncap", resource=resource))
        self._resource = resource
        self._cap = cap

    def compose(self) -> ComposeResult:
        """Yield the widgets of the box."""
        with Vertical(classes="box"):
            yield Static("At most (leave it empty to remove the limit):")
            yield Input("" if self._cap is None else str(self._cap), id="cap", max_length=10)
            with VerticalScroll(can_focus=False):
                yield Static(id="consequence")
            yield Static("Enter  go on     Escape  back", id="keys")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the consequences of the new cap."""
        text = event.value.strip()
        if not text:
            self.action = Action("uncap", resource=self._resource)
        elif text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_INT:
            self.action = Action("cap", resource=self._resource, cap=int(text))
        else:
            self.action = None
        self.update_overview(self.overview)

    def on_input_submitted(self) -> None:
        """Return the action, to be confirmed."""
        if self.consequence is not None and self.consequence.possible:
            self.dismiss(self.action)


class Help(ModalScreen[None]):
    """The list of keys."""

    def compose(self) -> ComposeResult:
        """Yield the widgets of the box."""
        with Vertical(classes="box"):
            yield Static(HELP)

    def on_key(self) -> None:
        """Close the list."""
        self.dismiss(None)
