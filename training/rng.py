"""The random source and the held-out rule. Small enough to be written again in any language.

splitmix64 (Steele, Lea, Flood): state += 0x9E3779B97F4A7C15, then two xor-shift-multiply rounds.
`below(n)` is the upper 32 bits times n, shifted right by 32: no rejection, no modulo.
"""

MASK = (1 << 64) - 1


class Rng:
    def __init__(self, seed: int):
        self.state = seed & MASK

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        return ((self.next() >> 32) * n) >> 32

    def range(self, low: int, high: int) -> int:
        """An integer in low..=high."""
        return low + self.below(high - low + 1)

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent

    def pick(self, items):
        return items[self.below(len(items))]

    def shuffle(self, items):
        """Fisher-Yates from the back; returns a new list."""
        items = list(items)
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]
        return items

    def sample(self, items, k: int):
        """k different items in random order (a partial shuffle from the front)."""
        items = list(items)
        for i in range(k):
            j = i + self.below(len(items) - i)
            items[i], items[j] = items[j], items[i]
        return items[:k]


def fnv1a(text: str) -> int:
    """64-bit FNV-1a of the UTF-8 bytes."""
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def held_out(key: str) -> bool:
    """Inputs whose hash is 0 mod 10 never occur in training."""
    return fnv1a(key) % 10 == 0


TEST_VECTORS = {
    "splitmix64(1) first three": [10451216379200822465, 13757245211066428519, 17911839290282890590],
    "fnv1a('copy k f q')": fnv1a("copy k f q"),
}

if __name__ == "__main__":
    rng = Rng(1)
    assert [rng.next() for _ in range(3)] == TEST_VECTORS["splitmix64(1) first three"]
    print("ok")
