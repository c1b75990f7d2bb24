"""Words, keys, values and names for the RULER-style tasks, each drawn without repeats from one seeded stream.

All lists are our own, long enough for a million tokens. This file refuses to know tasks and lengths.
"""

import random
from collections.abc import Callable, Iterator, Sequence

ADJECTIVES = (
    "quiet", "amber", "brave", "calm", "clever", "crisp", "dusty", "early", "eager", "faint",
    "fierce", "gentle", "golden", "grey", "happy", "heavy", "hollow", "humble", "icy", "idle",
    "ivory", "jolly", "keen", "kind", "lively", "lonely", "lucky", "mellow", "misty", "modest",
    "narrow", "noble", "odd", "olive", "pale", "patient", "plain", "polite", "proud", "purple",
    "quick", "rapid", "rare", "ripe", "rough", "round", "rusty", "sandy", "scarlet", "secret",
    "shady", "sharp", "shiny", "silent", "silver", "simple", "sleepy", "slim", "smooth", "sober",
    "soft", "solid", "spare", "steady", "steep", "stern", "still", "stout", "strange", "sturdy",
    "subtle", "sunny", "sweet", "swift", "tall", "tame", "tender", "thin", "tidy", "tiny",
    "tired", "tough", "upper", "urgent", "vague", "vast", "velvet", "violet", "vivid", "warm",
    "wary", "weary", "wide", "wild", "windy", "wise", "witty", "wooden", "young", "zesty",
)  # fmt: skip
NOUNS = (
    "anchor", "apron", "arrow", "badge", "barrel", "beacon", "bell", "blanket", "boot", "bottle",
    "branch", "bridge", "bucket", "button", "cabin", "candle", "canoe", "carpet", "castle", "cellar",
    "chain", "chapel", "chimney", "circle", "cliff", "cloud", "compass", "copper", "corner", "cradle",
    "curtain", "desert", "drum", "engine", "falcon", "feather", "fiddle", "forest", "fountain", "garden",
    "glacier", "glove", "granite", "guitar", "hammer", "harbour", "hedge", "helmet", "hill", "island",
    "jacket", "kettle", "ladder", "lantern", "ledger", "lemon", "letter", "magnet", "marble", "market",
    "meadow", "mirror", "mountain", "needle", "orchard", "oven", "paddle", "parcel", "pebble", "pencil",
    "pillow", "planet", "pocket", "prairie", "quarry", "ribbon", "river", "rocket", "saddle", "sailor",
    "shadow", "shovel", "signal", "spoon", "stable", "statue", "summit", "table", "temple", "thunder",
    "ticket", "tower", "trumpet", "tunnel", "valley", "village", "wagon", "whistle", "window", "winter",
)  # fmt: skip
FIRST = (
    "Adela", "Albert", "Agnes", "Basil", "Beatrice", "Boris", "Camilla", "Cedric", "Conrad", "Cora",
    "Daphne", "Dorian", "Edith", "Edmund", "Elsa", "Ernest", "Esther", "Fabian", "Flora", "Gideon",
    "Greta", "Gustav", "Hannah", "Harold", "Hedwig", "Hugo", "Imogen", "Irene", "Ivan", "Jasper",
    "Joanna", "Julian", "Katrin", "Konrad", "Lars", "Leonora", "Linus", "Lydia", "Magnus", "Mathilda",
    "Miriam", "Nadia", "Nestor", "Olga", "Ophelia", "Osbert", "Pascal", "Petra", "Quentin", "Ralph",
    "Regina", "Rufus", "Selma", "Stefan", "Tabitha", "Theodor", "Ursula", "Vincent", "Wanda", "Yvonne",
)  # fmt: skip
LAST = (
    "Abernook", "Alderby", "Barrowfen", "Bellworth", "Birchall", "Blackmere", "Bramhope", "Calderon",
    "Carrick", "Chadwell", "Clayburn", "Coldham", "Crowhurst", "Dalby", "Denholm", "Dunsford",
    "Eastlake", "Elmhurst", "Fairburn", "Farrow", "Fenwick", "Galbraith", "Garland", "Glenroy",
    "Greystone", "Hadlow", "Hartwell", "Hawkshaw", "Hazelby", "Holbrook", "Inglewood", "Ironside",
    "Jessop", "Kelling", "Kettlewell", "Kirkbride", "Lambourne", "Langdale", "Larkin", "Lockwood",
    "Loxley", "Marchbank", "Marlow", "Merrick", "Milburn", "Moorcroft", "Netherby", "Norwell",
    "Oakley", "Ormsby", "Pemberley", "Penrose", "Prescott", "Quarles", "Radley", "Ravensdale",
    "Redfern", "Rookwood", "Sallow", "Selwyn", "Sherwin", "Stanbury", "Stillwell", "Stoneham",
    "Tarleton", "Thornby", "Tolland", "Trevane", "Underhill", "Upshaw", "Varley", "Wakeling",
    "Waverley", "Westbrook", "Whitlock", "Wildgoose", "Winslow", "Woodbine", "Wyndham", "Yardley",
)  # fmt: skip
_TOWN = (
    ("Ald", "Bar", "Bex", "Brim", "Cal", "Cor", "Dal", "Dun", "Ebb", "Els", "Fal", "Fen", "Gar", "Gol", "Had", "Hex",
     "Ilk", "Ist", "Jed", "Kel", "Kir", "Lam", "Lox", "Mal", "Mor", "Nan", "Nor", "Ost", "Pel", "Pir", "Quil", "Rad",
     "Rom", "Sal", "Sel", "Tar", "Tor", "Ulf", "Ver", "Wex", "Yar", "Zel"),
    ("", "a", "en", "er", "ing", "o", "um", "yn"),
    ("beck", "bourne", "bridge", "bury", "by", "combe", "cote", "dale", "den", "field", "firth", "ford", "gate", "ham",
     "haven", "holm", "hythe", "leigh", "mere", "minster", "mouth", "ness", "port", "stead", "stow", "thorpe", "ton",
     "wick", "wold", "worth"),
)  # fmt: skip
_CONSONANTS, _VOWELS = "bdfgklmnprstvxz", "aeiou"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def combined(rng: random.Random, *parts: Sequence[str], between: str = "") -> Iterator[str]:
    """Every combination of one word from each part, once, in random order."""
    sizes = [len(part) for part in parts]
    total = 1
    for size in sizes:
        total *= size
    for number in rng.sample(range(total), total):
        chosen, left = [], number
        for part, size in zip(parts, sizes, strict=True):
            left, place = divmod(left, size)
            chosen.append(part[place])
        yield between.join(chosen)


def keys(rng: random.Random) -> Iterator[str]:
    """Different keys such as `quiet-anchor`; after ten thousand of them three words long."""
    yield from combined(rng, ADJECTIVES, NOUNS, between="-")
    yield from combined(rng, ADJECTIVES, ADJECTIVES, NOUNS, between="-")


def numbers(rng: random.Random, low: int = 1_000_000, high: int = 9_999_999) -> Iterator[str]:
    """Different whole numbers from `low` to `high`, as text."""
    return _distinct(lambda: str(rng.randint(low, high)))


def codes(rng: random.Random) -> Iterator[str]:
    """Different codes in the layout of a UUID."""

    def one() -> str:
        text = f"{rng.getrandbits(128):032x}"
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    return _distinct(one)


def variables(rng: random.Random, letters: int = 5) -> Iterator[str]:
    """Different variable names in capital letters."""
    return _distinct(lambda: "".join(rng.choices(_LETTERS, k=letters)))


def coded(rng: random.Random, syllables: int = 3) -> Iterator[str]:
    """Different words of two-letter syllables that mean nothing, such as `kavilo`."""
    parts = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    return _distinct(lambda: "".join(rng.choices(parts, k=syllables)))


def plain(rng: random.Random, need: int) -> Iterator[str]:
    """Different English words if 200 are enough for `need`, else pairs such as `quiet-anchor`, else triples.

    Never a mixture: a word that is a part of another, or rarer in kind, would tell more than its count.
    """
    words = (*ADJECTIVES, *NOUNS)
    if need <= len(words):
        return combined(rng, words)
    pair = (ADJECTIVES, NOUNS)
    return combined(rng, *pair if need <= len(ADJECTIVES) * len(NOUNS) else (ADJECTIVES, *pair), between="-")


def towns(rng: random.Random) -> Iterator[str]:
    """Different names of towns that do not exist."""
    yield from combined(rng, *_TOWN)
    yield from combined(rng, _TOWN[0], _TOWN[1][1:], _TOWN[1][1:], _TOWN[2])


def people(rng: random.Random) -> Iterator[str]:
    """Different names of people; after the first few thousand with an initial in the middle."""
    yield from combined(rng, FIRST, LAST, between=" ")
    yield from combined(rng, FIRST, [f"{letter}." for letter in _LETTERS], LAST, between=" ")


def _distinct(draw: Callable[[], str]) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        one = draw()
        if one not in seen:
            seen.add(one)
            yield one
