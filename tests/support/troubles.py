"""Run the effects of an operation on a model of the database, with troubles at chosen ones."""


class Troubled:
    """The base of such a model, which defines ``effect(operation)``. Its clock moves with each wait."""

    #: The calls that meet no trouble.
    spared = ()

    def __init__(self, troubles=()):
        self.troubles = dict(troubles)  # number of the operation → (after its effect, error)
        self.done, self.struck = [], []
        self.clock = 0.0

    def now(self):
        return self.clock

    def perform(self, operation):
        after, error = self.troubles.get(len(self.done), (False, None))
        self.done.append(operation)
        if getattr(operation, "what", None) in self.spared:
            error = None
        if error is not None:
            self.struck.append(operation)
        if error is not None and not after:
            raise error
        result = self.effect(operation)
        if error is not None:
            raise error
        return result
