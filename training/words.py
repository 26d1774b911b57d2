"""Word lists of the synthetic world. Invented names are made of syllables, so no outside text is used."""

from rng import Rng

ANIMALS = "fox owl bear mouse cat dog hen goat wolf frog crow deer horse pony seal toad swan duck bee ant".split()
NAMES = ("Mara Tom Lena Oskar Ida Pavel Nora Felix Vera Hugo Alma Boris Clara Dario Elsa Finn Greta Henri Iris Jonas "
         "Karla Leo Mila Nils Olga Piet Rosa Sven Tilda Uwe Wanda Yara Zeno Anton Berta Carl Doris Emil Frida Georg").split()
CITIES = ("Telmo Varna Lisk Oruna Pelda Quento Rimas Sorel Tavik Ulmar Vesto Wendel Yarrow Zemka Arlen Brisko Caldo "
          "Dorset Elmir Fenna Gorva Hasko Ilmen Jurka Kolda Lumen Mirna Nevik Ostra Palma").split()
JOBS = "baker teacher doctor painter farmer pilot nurse driver writer singer cook tailor judge clerk".split()
COLOURS = "red green blue yellow white purple".split()
PETS = "parrot hamster rabbit turtle kitten puppy".split()
HOBBIES = "chess music tennis rowing dancing fishing reading skating".split()
FOODS = "soup bread rice fish beans cheese apples cake pasta salad".split()
PLACES = "forest river garden village castle market bridge harbour meadow tower".split()
OBJECTS = "lamp key map rope drum book coin bell kite boat".split()
MOODS = "happy tired brave quiet clever gentle proud curious".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ROOMS = "kitchen bedroom bathroom hall garage office".split()
SONGS = "Morning Light;River Song;Blue Train;Old Friends;Silver Moon;Paper Boats".split(";")
SKIES = "rain sun snow fog wind clouds".split()
CURRENCIES = "euro dollar yen pound franc".split()
SHAPES = "circle square triangle cross diamond".split()
QUADRANTS = ["top left", "top right", "bottom left", "bottom right"]

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def syllable(rng):
    return rng.pick(CONSONANTS) + rng.pick(VOWELS)


def invented(seed, count, parts, endings=("",)):
    """`count` different words of `parts` syllables and one ending."""
    rng, words = Rng(seed), []
    while len(words) < count:
        word = "".join(syllable(rng) for _ in range(parts)) + rng.pick(endings)
        if word not in words:
            words.append(word)
    return words


# 240 keys of the retrieval task.
KEYS = invented(11, 240, 2, ("n", "r", "s", "t", "l", "k"))

# 50 lands with 4 facts each: the 200 facts that are learned by heart.
LANDS = [word.capitalize() for word in invented(12, 50, 2, ("nia", "land", "stan", "via"))]
CAPITALS = [word.capitalize() for word in invented(13, 50, 2, ("burg", "polis", "ton"))]
RIVERS = [word.capitalize() for word in invented(14, 50, 2, ("sa", "mo", "ra"))]
_rng = Rng(15)
FACTS = []  # (land, attribute, value)
for _land, _capital, _river in zip(LANDS, CAPITALS, RIVERS):
    FACTS += [(_land, "capital", _capital), (_land, "river", _river),
              (_land, "colour", _rng.pick(COLOURS)), (_land, "dish", _rng.pick(FOODS))]
