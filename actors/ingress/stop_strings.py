"""Stop strings over a stream of text: nothing that belongs to one is ever let out."""

from collections.abc import Sequence


class StopString:
    """With its Knuth-Morris-Pratt table: whatever the text, a character of it takes constant time.

    The table takes time of its own, so it is made once for all the prompts of a request.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = [0] * len(text)
        """[i]: the longest proper prefix of the stop string that its first i + 1 characters end with."""
        length = 0
        for index in range(1, len(text)):
            length = self.extended(length, text[index])
            self._shorter[index] = length

    def extended(self, length: int, char: str) -> int:
        """What of the stop string a text ends with after char, that ended with `length` characters of it."""
        while length and self.text[length] != char:
            length = self._shorter[length - 1]
        return length + (self.text[length] == char)


class StopStrings:
    """Lets text through up to the first stop string that is complete.

    Characters that may yet turn out to begin a stop string are held back, and no others. Of stop strings that
    end at the same character the longest wins. The outcome depends on the text alone, not on how it was cut.
    """

    def __init__(self, stops: Sequence[StopString]) -> None:
        self._stops = stops
        self._matched = [0] * len(stops)
        """Of each stop string: how much of its beginning the text ends with."""
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that may be shown now. After a stop string was found there is none."""
        if self.found:
            return ""
        if not self._stops:
            return text
        buffered = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._matched = [
                stop.extended(length, char) for stop, length in zip(self._stops, self._matched, strict=True)
            ]
            complete = [
                length
                for stop, length in zip(self._stops, self._matched, strict=True)
                if length == len(stop.text)
            ]
            if complete:
                self.found = True
                self._held = ""
                return buffered[: end - max(complete)]
        cut = len(buffered) - max(self._matched)
        self._held = buffered[cut:]
        return buffered[:cut]

    def flush(self) -> str:
        """At the end of the stream what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held
