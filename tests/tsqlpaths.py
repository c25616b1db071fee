"""Walk every path through a T-SQL routine, and check the transaction on each.

A routine that logins may run is walked twice: called outside a transaction, and inside one; other routines as these
call them. On the way @@TRANCOUNT is known, and its copies (``@inside = @@TRANCOUNT``); the answer to a condition that
decides about transactions is remembered. The faults: a path that leaves another @@TRANCOUNT than it found (266), COMMIT
and ROLLBACK of nothing (3902, 3903), a transaction that an error leaves open because it began outside TRY and without
XACT_ABORT, and application locks of a transaction where there is none (APPLOCK_MODE, APPLOCK_TEST, sp_getapplock).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tsqltree import Node, called

Finding = tuple[int, str]
#: Procedures that only the triggers of make_guard call.
INSIDE = {"check_guard"}
#: Procedures that never return.
RAISES = {("sqlsem", "raise_error")}
CONTROL = ("BeginTransactionStatement", "CommitTransactionStatement", "RollbackTransactionStatement")
#: With more states than these, paths are merged.
MAX_STATES = 10_000
NEGATED = {"<>": "=", "!=": "=", ">=": "<", "<=": ">"}


@dataclass(frozen=True)
class State:
    """The facts at one point of a path."""

    count: int  # @@TRANCOUNT
    aborts: bool  # XACT_ABORT
    known: frozenset[tuple[str, int]] = frozenset()  # variable, or condition, → value

    def get(self, name: str) -> int | None:
        return next((value for key, value in self.known if key == name), None)

    def put(self, name: str, value: int | None) -> State:
        kept = {fact for fact in self.known if fact[0] != name}
        return replace(self, known=frozenset(kept if value is None else kept | {(name, value)}))

    def forget(self, variable: str) -> State:
        """Drop the known values of an assigned variable, and of conditions with it."""
        word = re.compile(rf"(?<![\w@]){re.escape(variable)}(?!\w)", re.IGNORECASE)
        return replace(self, known=frozenset(fact for fact in self.known if not word.search(fact[0])))


class Ends:
    """The states of paths that do not go on with the next statement."""

    def __init__(self) -> None:
        self.returned: set[State] = set()
        self.thrown: set[State] = set()
        self.broken: set[State] = set()
        self.continued: set[State] = set()


@dataclass(frozen=True)
class Context:
    """The circumstances of a call of a routine."""

    count: int  # @@TRANCOUNT
    aborts: bool = False  # XACT_ABORT
    tried: bool = False  # in a TRY of a caller


class Walk:
    """The paths through one routine, called in one way."""

    def __init__(self, routine: Node, context: Context) -> None:
        self.findings: set[Finding] = set()
        self.calls: set[tuple[str, Context]] = set()
        self.context = context
        self.entry = count = context.count
        self.relevant = _relevant(routine)
        self.two_valued = _two_valued(routine, self.relevant)
        ends = Ends()
        last = routine.line
        left = self.run(_listed(routine, "StatementList"), {State(count, context.aborts)}, ends, tried=False)
        for state in left | ends.returned:
            if state.count != count:
                self.say(last, f"a path ends with @@TRANCOUNT {state.count}, and began with {count} (266)")

    def say(self, line: int, words: str) -> None:
        self.findings.add((line, words))

    # -- statements --------------------------------------------------------------------------------------------------

    def run(self, statements: Iterable[Node], states: set[State], ends: Ends, tried: bool) -> set[State]:
        for statement in statements:
            if not states:
                break
            states = self.step(statement, states, ends, tried)
            if len(states) > MAX_STATES:
                self.say(statement.line, "more paths than can be followed: make the routine simpler")
                states = {replace(state, known=frozenset()) for state in states}
        return states

    def step(self, statement: Node, states: set[State], ends: Ends, tried: bool) -> set[State]:
        kind = statement.kind
        if tried:
            ends.thrown |= states  # an error of the statement itself
        if kind == "BeginEndBlockStatement":
            return self.run(_listed(statement, "StatementList"), states, ends, tried)
        if kind == "TryCatchStatement":
            return self.tried(statement, states, ends, tried)
        if kind == "IfStatement":
            return self.branched(statement, states, ends, tried)
        if kind == "WhileStatement":
            return self.looped(statement, states, ends, tried)
        self.expressions(statement, states)
        if kind == "ReturnStatement":
            for state in states:
                if state.count != self.entry:
                    words = f"RETURN with @@TRANCOUNT {state.count}, and it began with {self.entry} (266)"
                    self.say(statement.line, words)
            return set()
        if kind == "ThrowStatement" or (kind == "ExecuteStatement" and called(statement) in RAISES):
            for state in states:
                self.call(statement, state, tried)
            if not tried:
                for state in states:
                    if state.count not in (0, self.entry) and not state.aborts and not self.context.tried:
                        words = "THROW in a transaction of its own, outside TRY and without XACT_ABORT: it stays open"
                        self.say(statement.line, words)
                return set()
            ends.thrown |= states
            return set()
        if kind in ("BreakStatement", "ContinueStatement"):
            (ends.broken if kind == "BreakStatement" else ends.continued).update(states)
            return set()
        return {self.after(statement, state, tried) for state in states}

    def after(self, statement: Node, state: State, tried: bool) -> State:
        """Return the state behind a plain statement."""
        kind = statement.kind
        if kind == "BeginTransactionStatement":
            if not tried and not state.aborts and not self.context.tried:
                self.say(
                    statement.line, "BEGIN TRANSACTION outside TRY and without XACT_ABORT: an error leaves it open"
                )
            return replace(state, count=state.count + 1)
        if kind == "CommitTransactionStatement":
            if state.count == 0:
                self.say(statement.line, "COMMIT without a transaction (3902)")
            return replace(state, count=max(0, state.count - 1))
        if kind == "RollbackTransactionStatement":
            if statement.part("Name") is not None:
                return state  # to a savepoint
            if state.count == 0:
                self.say(statement.line, "ROLLBACK without a transaction (3903)")
            return replace(state, count=0)
        if kind == "PredicateSetStatement" and "XactAbort" in statement.word("Options"):
            return replace(state, aborts=statement.word("IsOn") == "True")
        if kind == "ExecuteStatement":
            self.locks(statement, state)
            self.call(statement, state, tried)
        for variable, value in _assigned(statement):
            number = None
            if value is not None and variable in self.relevant:
                number = self.value(value, state)
            state = state.forget(variable).put(variable, number)
        return state

    def call(self, statement: Node, state: State, tried: bool) -> None:
        schema, name = called(statement)
        if schema == "sqlsem":
            self.calls.add((name, Context(state.count, state.aborts, tried or self.context.tried)))

    def tried(self, statement: Node, states: set[State], ends: Ends, tried: bool) -> set[State]:
        inner = Ends()
        left = self.run(_listed(statement, "TryStatements"), states, inner, tried=True)
        # The transaction may be doomed; the known values of variables are those at the statement that failed.
        caught = inner.thrown | states
        for own, theirs in ((ends.returned, inner.returned), (ends.broken, inner.broken)):
            own |= theirs
        ends.continued |= inner.continued
        return left | self.run(_listed(statement, "CatchStatements"), caught, ends, tried)

    def branched(self, statement: Node, states: set[State], ends: Ends, tried: bool) -> set[State]:
        predicate, then, other = (statement.part(name) for name in ("Predicate", "ThenStatement", "ElseStatement"))
        assert predicate is not None
        assert then is not None
        self.expressions(predicate, states)
        true, false = self.split(predicate, states)
        left = self.step(then, true, ends, tried) if true else set()
        return left | (self.step(other, false, ends, tried) if other is not None and false else false)

    def looped(self, statement: Node, states: set[State], ends: Ends, tried: bool) -> set[State]:
        predicate, body = statement.part("Predicate"), statement.part("Statement")
        assert predicate is not None
        assert body is not None
        seen: set[State] = set()
        left: set[State] = set()
        new = states
        while new:
            seen |= new
            self.expressions(predicate, new)
            true, false = self.split(predicate, new)
            inner = Ends()
            again = (self.step(body, true, inner, tried) if true else set()) | inner.continued
            left |= false | inner.broken
            ends.returned |= inner.returned
            ends.thrown |= inner.thrown
            new = again - seen
            if len(seen) > MAX_STATES:
                self.say(statement.line, "more paths than can be followed: make the loop simpler")
                break
        return left

    # -- expressions -------------------------------------------------------------------------------------------------

    def expressions(self, node: Node, states: set[State]) -> None:
        """Yield application locks of a transaction where there may be none."""
        states = {state for state in states if state.count == 0}
        if not states:
            return
        for call in node.all("FunctionCall"):
            name = call.part("FunctionName")
            if name is None or name.word("Value").upper() not in ("APPLOCK_MODE", "APPLOCK_TEST"):
                continue
            owner = call.parts("Parameters")[-1]
            if owner.word("Value") == "Transaction" and any(self.reached(call, node, state) for state in states):
                words = "of a 'Transaction' is asked where there may be none (AND and OR promise no order): IF in an IF"
                self.say(call.line, f"{name.word('Value')} {words}")

    def reached(self, call: Node, outermost: Node, state: State) -> bool:
        """Return False if a CASE around the call, which promises its order, answers before."""
        inner = call
        for around in call.above():
            if around.kind == "SearchedWhenClause" and inner.field == "ThenExpression":
                when = around.part("WhenExpression")
                if when is not None and self.truth(when, state) is False:
                    return False
            if around.kind == "SearchedCaseExpression":
                for clause in around.parts("WhenClauses"):
                    when = clause.part("WhenExpression")
                    if clause is not inner and when is not None and self.truth(when, state):
                        return False
                    if clause is inner:
                        break
            if around is outermost:
                break
            inner = around
        return True

    def locks(self, statement: Node, state: State) -> None:
        name = called(statement)[1]
        if name not in ("sp_getapplock", "sp_releaseapplock") or state.count > 0:
            return
        place = 2 if name == "sp_getapplock" else 1
        owner = None
        for number, parameter in enumerate(statement.all("ExecuteParameter")):
            variable = parameter.part("Variable")
            named = variable is not None and variable.word("Name").lower() == "@lockowner"
            if named or (variable is None and number == place):
                owner = parameter.part("ParameterValue")
        if owner is None or owner.word("Value") == "Transaction":
            self.say(statement.line, f"{name} for a transaction where there is none (-999)")

    def value(self, node: Node, state: State) -> int | None:
        kind = node.kind
        if kind == "IntegerLiteral":
            return int(node.word("Value"))
        if kind == "UnaryExpression" and node.word("UnaryExpressionType") == "Negative":
            inner = node.part("Expression")
            number = None if inner is None else self.value(inner, state)
            return None if number is None else -number
        if kind == "GlobalVariableExpression" and node.word("Name").upper() == "@@TRANCOUNT":
            return state.count
        if kind == "VariableReference":
            return state.get(node.word("Name").lower())
        if kind in ("ParenthesisExpression", "CastCall", "ConvertCall"):
            inner = node.part("Expression") or node.part("Parameter")
            return None if inner is None else self.value(inner, state)
        if kind == "FunctionCall":
            name = node.part("FunctionName")
            if name is not None and name.word("Value").upper() == "XACT_STATE" and state.count == 0:
                return 0
        if kind == "SearchedCaseExpression":
            for clause in node.parts("WhenClauses"):
                when, then = clause.part("WhenExpression"), clause.part("ThenExpression")
                assert when is not None
                assert then is not None
                answer = self.truth(when, state)
                if answer is None:
                    return None
                if answer:
                    return self.value(then, state)
            other = node.part("ElseExpression")
            return None if other is None else self.value(other, state)
        return None

    def truth(self, node: Node, state: State) -> bool | None:
        """Return True, False, or None if it is not known."""
        kind = node.kind
        if kind in ("BooleanParenthesisExpression", "BooleanNotExpression"):
            inner = node.part("Expression")
            assert inner is not None
            answer = self.truth(inner, state)
            return answer if answer is None or kind == "BooleanParenthesisExpression" else not answer
        if kind == "BooleanBinaryExpression":
            both = [self.truth(operand, state) for operand in node.children()]
            if node.word("BinaryExpressionType") == "And":
                return False if False in both else True if both == [True, True] else None
            return True if True in both else False if both == [False, False] else None
        if kind == "BooleanComparisonExpression":
            first, second = node.part("FirstExpression"), node.part("SecondExpression")
            assert first is not None
            assert second is not None
            if first.kind == second.kind == "IntegerLiteral" and first.word("Value") == second.word("Value"):
                return node.word("ComparisonType") == "Equals"  # WHILE 1 = 1
            left, right = self.value(first, state), self.value(second, state)
            if left is not None and right is not None:
                return bool(
                    {
                        "Equals": left == right,
                        "NotEqualToBrackets": left != right,
                        "NotEqualToExclamation": left != right,
                        "GreaterThan": left > right,
                        "GreaterThanOrEqualTo": left >= right,
                        "LessThan": left < right,
                        "LessThanOrEqualTo": left <= right,
                    }[node.word("ComparisonType")]
                )
        text, turned = _condition(node.text())
        value = state.get(text)
        return None if value is None else bool(value) != turned

    def split(self, predicate: Node, states: set[State]) -> tuple[set[State], set[State]]:
        """Return the states in which a condition may be true, and those in which it may be false."""
        true: set[State] = set()
        false: set[State] = set()
        for state in states:
            answer = self.truth(predicate, state)
            if answer is not False:
                true.add(self.assume(predicate, state, True))
            if answer is not True:
                false.add(self.assume(predicate, state, False))
        return true, false

    def assume(self, node: Node, state: State, answer: bool) -> State:
        """Remember the answer to a condition, if it decides about transactions."""
        if self.truth(node, state) is not None:
            return state
        if node.kind in ("BooleanParenthesisExpression", "BooleanNotExpression"):
            inner = node.part("Expression")
            assert inner is not None
            return self.assume(inner, state, answer == (node.kind == "BooleanParenthesisExpression"))
        if node.kind == "BooleanBinaryExpression":
            sides = list(node.children())
            if (node.word("BinaryExpressionType") == "And") != answer:  # only one operand must be so
                sides = [side for side in sides if self.truth(side, state) is None]
                if len(sides) > 1:
                    return state
            for side in sides:
                state = self.assume(side, state, answer)
            return state
        names = {reference.word("Name").lower() for reference in node.all("VariableReference")}
        if not names or not names <= self.relevant or any(True for _ in node.all("ScalarSubquery", "FunctionCall")):
            return state
        if node.kind == "BooleanComparisonExpression":
            first, second = node.part("FirstExpression"), node.part("SecondExpression")
            if first is not None and second is not None and first.kind == "VariableReference":
                name, number = first.word("Name").lower(), self.value(second, state)
                if number is not None and node.word("ComparisonType") == "Equals":
                    if answer:
                        return state.put(name, number)
                    if name in self.two_valued:
                        return state.put(name, 1 - number)
        text, turned = _condition(node.text())
        return state.put(text, int(answer != turned))


# -- helpers --------------------------------------------------------------------------------------------------------


def _listed(node: Node, name: str) -> list[Node]:
    found = node.part(name)
    return [] if found is None else found.parts("Statements")


def _condition(text: str) -> tuple[str, bool]:
    """Return a condition as it is remembered, and True if the contrary is remembered."""
    for turned, plain in NEGATED.items():
        left, operator, right = text.partition(f" {turned} ")
        if operator:
            return f"{left} {plain} {right}".lower(), True
    left, operator, right = text.partition(" IS NOT NULL")
    return (f"{left} is null{right}".lower(), True) if operator else (text.lower(), False)


def _assigned(statement: Node) -> Iterator[tuple[str, Node | None]]:
    """Yield each variable that a statement gives a value to, and the value where it is an expression."""
    for node in statement.walk():
        if node.kind == "DeclareVariableElement":
            name = node.part("VariableName")
            assert name is not None
            yield name.word("Value").lower(), node.part("Value")
        elif node.kind in ("SetVariableStatement", "SelectSetVariable"):
            variable = node.part("Variable")
            assert variable is not None
            yield (
                variable.word("Name").lower(),
                node.part("Expression") if node.kind == "SetVariableStatement" else None,
            )
        elif node.kind == "AssignmentSetClause" and node.part("Variable") is not None:
            yield node.part("Variable").word("Name").lower(), None  # type: ignore[union-attr]
        elif node.kind == "ExecuteParameter" and node.word("IsOutput") == "True":
            for reference in node.all("VariableReference"):
                yield reference.word("Name").lower(), None
        elif node.kind == "ExecuteSpecification":
            result = node.part("Variable")
            if result is not None:
                yield result.word("Name").lower(), None


def _relevant(routine: Node) -> frozenset[str]:
    """Return the variables in the conditions around the begin or end of a transaction, and copies of @@TRANCOUNT."""
    names: set[str] = set()
    for node in routine.all(*CONTROL):
        for around in node.above():
            if around.kind in ("IfStatement", "WhileStatement"):
                predicate = around.part("Predicate")
                assert predicate is not None
                names |= {reference.word("Name").lower() for reference in predicate.all("VariableReference")}
    for node in routine.walk():
        if node.kind not in ("DeclareVariableElement", "SetVariableStatement"):
            continue
        value = node.part("Value") or node.part("Expression")
        if value is not None and any(
            variable.word("Name").upper() == "@@TRANCOUNT" for variable in value.all("GlobalVariableExpression")
        ):
            names |= {name for name, _ in _assigned(node)}
    return frozenset(names)


def _two_valued(routine: Node, relevant: frozenset[str]) -> frozenset[str]:
    """Return the variables that are compared with 0 and 1 only."""
    others: set[str] = set()
    for node in routine.all("BooleanComparisonExpression", "BooleanIsNullExpression"):
        first, second = node.part("FirstExpression"), node.part("SecondExpression")
        plain = second is not None and second.kind == "IntegerLiteral" and second.word("Value") in ("0", "1")
        if (
            first is None
            or first.kind != "VariableReference"
            or not plain
            or "Equal" not in node.word("ComparisonType")
        ):
            others |= {reference.word("Name").lower() for reference in node.all("VariableReference")}
    return relevant - others


def findings(routines: Mapping[str, Node], public: Collection[str]) -> Iterator[tuple[str, int, str]]:
    """Yield name of the routine, line and fault of its paths. ``public``: procedures that logins may run."""
    new: list[tuple[str, Context]] = []
    for name, routine in routines.items():
        if "Trigger" in routine.kind or name in INSIDE:
            new.append((name, Context(1)))
        elif name in public:
            new += [(name, Context(0)), (name, Context(1))]
    seen: set[tuple[str, Context]] = set()
    found: set[tuple[str, int, str]] = set()
    while new:
        name, context = key = new.pop()
        if key in seen or name not in routines:
            continue
        seen.add(key)
        walk = Walk(routines[name], context)
        found |= {(name, *finding) for finding in walk.findings}
        new += sorted(walk.calls - seen, key=str)
    walked = {name for name, _ in seen}
    found |= {
        (name, routine.line, "no routine calls it, and no login may run it")
        for name, routine in routines.items()
        if name not in walked
    }
    yield from sorted(found)
