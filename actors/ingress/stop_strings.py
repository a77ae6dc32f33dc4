"""Stop strings over a stream of text: nothing that belongs to one is ever let out."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string that is complete.

    Characters that may yet turn out to begin a stop string are held back, and no others. Of stop strings that
    end at the same character the longest wins. The outcome depends on the text alone, not on how it was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_PrefixAutomaton(stop) for stop in stops]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that may be shown now. After a stop string was found there is none."""
        if self.found:
            return ""
        if not self._automata:
            return text
        buffered = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            matched = [len(a.stop) for a in self._automata if a.advance(char)]
            if matched:
                self.found = True
                self._held = ""
                return buffered[: end - max(matched)]
        cut = len(buffered) - max(a.matched for a in self._automata)
        self._held = buffered[cut:]
        return buffered[:cut]

    def flush(self) -> str:
        """At the end of the stream what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held


class _PrefixAutomaton:
    """Knuth-Morris-Pratt: the longest prefix of the stop string that the text ends with, in constant time a
    character, so that a long stop string cannot keep the event loop busy."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = [0] * len(stop)
        """[i]: the longest proper prefix of stop that stop[:i + 1] ends with."""
        length = 0
        for index in range(1, len(stop)):
            length = self._extended(length, stop[index])
            self._shorter[index] = length

    def advance(self, char: str) -> bool:
        """Whether the stop string is now complete; it is not asked again after that."""
        self.matched = self._extended(self.matched, char)
        return self.matched == len(self.stop)

    def _extended(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._shorter[length - 1]
        return length + (self.stop[length] == char)
