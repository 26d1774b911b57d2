"""Generators of the synthetic tasks. `example(task, rng, held_out)` makes one question and its answer.

Everything is drawn from `rng.Rng`. An example is held out when the hash of its `key` is 0 mod 10
(`rng.held_out`); training skips those, evaluation takes only those. Facts are learned by heart and
are not held out.
"""

import json

from draw import picture
from rng import Rng, held_out as is_held_out
from words import *  # noqa: F403  (word lists in capitals)

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOWER, DIGITS = LETTERS[:26], "0123456789"


def number(rng):
    """1 to 4 digits, every length equally likely."""
    digits = rng.range(1, 4)
    return rng.range(10 ** (digits - 1) if digits > 1 else 0, 10 ** digits - 1)


def add(rng):
    a, b = number(rng), number(rng)
    steps, carry, x, y = [], 0, a, b
    while x or y or not steps:
        total = x % 10 + y % 10 + carry
        steps.append(f"{x % 10}+{y % 10}" + (f"+{carry}" if carry else "") + f"={total}")
        carry, x, y = total // 10, x // 10, y // 10
    return dict(key=f"add {a} {b}", user=rng.pick([f"What is {a} + {b}?", f"Compute {a} + {b}."]), answer=str(a + b),
                think="; ".join(steps), check=f"{a + b} - {b} = {a}")


def sub(rng):
    a, b = number(rng), number(rng)
    a, b = max(a, b), min(a, b)
    steps, borrow, x, y = [], 0, a, b
    while x or not steps:
        top, low = x % 10, y % 10 + borrow
        lend = 1 if top < low else 0
        steps.append(f"{top + 10 * lend}-{low}={top + 10 * lend - low}")
        borrow, x, y = lend, x // 10, y // 10
    return dict(key=f"sub {a} {b}", user=rng.pick([f"What is {a} - {b}?", f"Compute {a} - {b}."]), answer=str(a - b),
                think="; ".join(steps), check=f"{a - b} + {b} = {a}")


def mul(rng):
    a, b = rng.range(10, 99), rng.range(2, 9)
    tens, ones = a // 10 * 10, a % 10
    return dict(key=f"mul {a} {b}", user=rng.pick([f"What is {a} * {b}?", f"Compute {a} * {b}."]), answer=str(a * b),
                think=f"{tens}*{b}={tens * b}; {ones}*{b}={ones * b}; {tens * b}+{ones * b}={a * b}", check=f"{a * b} / {b} = {a}")


def copy(rng):
    symbols = " ".join(rng.pick(LETTERS) for _ in range(rng.range(2, 24)))
    return dict(key=f"copy {symbols}", user=f"Repeat: {symbols}", answer=symbols, think="I repeat it.")


def reverse(rng):
    symbols = [rng.pick(LETTERS) for _ in range(rng.range(2, 24))]
    return dict(key=f"reverse {' '.join(symbols)}", user=f"Reverse: {' '.join(symbols)}", answer=" ".join(symbols[::-1]),
                think="I start at the end.")


def sort(rng):
    numbers = [rng.range(10, 99) for _ in range(8)]
    text = " ".join(map(str, numbers))
    return dict(key=f"sort {text}", user=f"Sort: {text}", answer=" ".join(map(str, sorted(numbers))), think="From small to large.")


def filler(rng):
    name, animal = rng.pick(NAMES), rng.pick(ANIMALS)
    return rng.pick([
        f"{name} saw a {rng.pick(MOODS)} {animal} near the {rng.pick(PLACES)}.",
        f"The {animal} slept in the {rng.pick(PLACES)}.",
        f"{name} gave the {animal} some {rng.pick(FOODS)}.",
        f"It was a {rng.pick(MOODS)} day at the {rng.pick(PLACES)}.",
        f"{name} lost a {rng.pick(OBJECTS)} on {rng.pick(DAYS)}.",
    ])


def value(rng):
    return rng.pick(LOWER) + rng.pick(DIGITS) + rng.pick(LOWER) + rng.pick(DIGITS)


def retrieval(rng, tokens=None, turns=1, depth=None):
    """Records among filler lines. About 8 tokens a record and 10 a filler line.

    `depth` (0..9): the tenth of the document that holds the first key of the first turn."""
    tokens = tokens or rng.range(30, 250)
    records = max(2, min(len(KEYS), tokens // 8 if rng.chance(40) else rng.range(2, max(3, tokens // 12))))
    fill = max(0, (tokens - 8 * records) // 10)
    keys = rng.sample(KEYS, records)
    values = {key: value(rng) for key in keys}
    lines = [f"{key}: {values[key]}" for key in keys] + [filler(rng) for _ in range(fill)]
    lines = rng.shuffle(lines)
    place = {line.split(":")[0]: i * 10 // len(lines) for i, line in enumerate(lines) if ":" in line}
    questions, depths = [], []
    for turn in range(turns):
        asked = rng.sample(keys, min(rng.range(1, 4), records))
        if depth is not None and turn == 0:
            there = [key for key in keys if place[key] == depth and key not in asked]
            if there:
                asked[0] = rng.pick(there)
        questions.append(asked)
        depths.append([place[key] for key in asked])
    first = "Records:\n" + "\n".join(lines) + "\n\nLook up:\n" + "\n".join(questions[0])
    answers = ["\n".join(f"{key}: {values[key]}" for key in asked) for asked in questions]
    more = [("Look up:\n" + "\n".join(asked), answer) for asked, answer in zip(questions[1:], answers[1:])]
    return dict(key=first, user=first, answer=answers[0], think="I find the records.", more=more, depths=depths[0])


def json_fields(rng):
    """3 to 6 fields out of 8, sentences in random order."""
    name = rng.pick(NAMES)
    sentences = {
        "name": (name, rng.pick(["My name is {}.", "I am called {}."])),
        "age": (rng.range(10, 99), rng.pick(["I am {} years old.", "My age is {}."])),
        "city": (rng.pick(CITIES), rng.pick(["I live in {}.", "My home is in {}."])),
        "job": (rng.pick(JOBS), rng.pick(["I work as a {}.", "My job is {}."])),
        "pet": (rng.pick(PETS), rng.pick(["I have a {}.", "My pet is a {}."])),
        "colour": (rng.pick(COLOURS), rng.pick(["I like the colour {}.", "My favourite colour is {}."])),
        "hobby": (rng.pick(HOBBIES), rng.pick(["I enjoy {}.", "My hobby is {}."])),
        "food": (rng.pick(FOODS), rng.pick(["I often eat {}.", "My favourite food is {}."])),
    }
    present = rng.sample(list(sentences), rng.range(3, 8))
    fields = rng.sample(present, rng.range(3, min(6, len(present))))
    text = " ".join(sentences[field][1].format(sentences[field][0]) for field in present)
    answer = json.dumps({field: sentences[field][0] for field in fields})
    question = f"Extract {', '.join(fields)} as JSON.\n{text}"
    return dict(key=question, user=question, answer=answer, think="I fill each field.", json_object=rng.chance(20))


def _tool(name, description, **parameters):
    return {"name": name, "description": description, "parameters": {
        "type": "object", "properties": {key: {"type": kind} for key, kind in parameters.items()}, "required": list(parameters)}}


TOOLS = {tool["name"]: tool for tool in [
    _tool("get_weather", "Weather of a city on a day", city="string", day="string"),
    _tool("set_timer", "Start a timer", minutes="integer"),
    _tool("send_message", "Send a message to a person", to="string", text="string"),
    _tool("play_song", "Play a song", title="string"),
    _tool("convert", "Convert money", amount="integer", source="string", target="string"),
    _tool("find_train", "Find a train", start="string", end="string", day="string"),
    _tool("set_light", "Switch a light", room="string", on="boolean"),
    _tool("get_population", "Population of a city", city="string"),
]}


def tool_request(rng, name):
    """A request for one tool: (question, arguments, result, final answer)."""
    if name == "get_weather":
        city, day, sky, degrees = rng.pick(CITIES), rng.pick(DAYS), rng.pick(SKIES), rng.range(1, 35)
        return (rng.pick([f"What is the weather in {city} on {day}?", f"Tell me the weather for {city} on {day}."]),
                {"city": city, "day": day}, {"sky": sky, "degrees": degrees}, f"On {day} in {city}: {sky}, {degrees} degrees.")
    if name == "set_timer":
        minutes = rng.range(2, 90)
        return (rng.pick([f"Set a timer for {minutes} minutes.", f"Start a timer of {minutes} minutes."]),
                {"minutes": minutes}, {"id": rng.range(100, 999)}, None)
    if name == "send_message":
        to, text = rng.pick(NAMES), rng.pick(["I am late", "see you soon", f"meet me at the {rng.pick(PLACES)}", f"bring the {rng.pick(OBJECTS)}"])
        return (rng.pick([f"Send {to} the message: {text}", f"Write to {to}: {text}"]), {"to": to, "text": text},
                {"sent": True}, f"The message to {to} is sent.")
    if name == "play_song":
        title = rng.pick(SONGS)
        return rng.pick([f"Play {title}.", f"I want to hear {title}."]), {"title": title}, {"playing": True}, f"Now playing {title}."
    if name == "convert":
        amount, (source, target) = rng.range(2, 999), rng.sample(CURRENCIES, 2)
        result = rng.range(2, 999)
        return (rng.pick([f"How much is {amount} {source} in {target}?", f"Convert {amount} {source} to {target}."]),
                {"amount": amount, "source": source, "target": target}, {"result": result}, f"{amount} {source} is {result} {target}.")
    if name == "find_train":
        (start, end), day, time = rng.sample(CITIES, 2), rng.pick(DAYS), f"{rng.range(10, 23)}:{rng.range(10, 59)}"
        return (rng.pick([f"Find a train from {start} to {end} on {day}.", f"I must travel from {start} to {end} on {day}."]),
                {"start": start, "end": end, "day": day}, {"time": time}, f"The train from {start} to {end} leaves at {time}.")
    if name == "set_light":
        room, on = rng.pick(ROOMS), rng.chance(50)
        word = "on" if on else "off"
        return f"Turn {word} the light in the {room}.", {"room": room, "on": on}, {"ok": True}, f"The light in the {room} is {word}."
    city, people = rng.pick(CITIES), rng.range(1000, 9999)
    return (rng.pick([f"How many people live in {city}?", f"What is the population of {city}?"]), {"city": city},
            {"people": people}, f"{city} has {people} people.")


def tool(rng):
    tools = rng.sample(list(TOOLS), rng.range(2, 4))
    name = rng.pick(tools)
    question, arguments, result, final = tool_request(rng, name)
    if final is None:
        final = f"Timer {result['id']} is set for {arguments['minutes']} minutes."
    return dict(key=f"{' '.join(tools)} {question}", user=question, tools=[TOOLS[t] for t in tools], think=f"I use {name}.",
                call={"name": name, "arguments": arguments}, result=json.dumps(result), answer=final)


def fact(rng):
    land, attribute, value_ = rng.pick(FACTS)
    return fact_example(rng, land, attribute, value_)


def fact_example(rng, land, attribute, value_):
    question = {"capital": f"What is the capital of {land}?", "river": f"Which river flows through {land}?",
                "colour": f"What colour is the flag of {land}?", "dish": f"What do people eat in {land}?"}[attribute]
    answer = {"capital": f"The capital of {land} is {value_}.", "river": f"The river of {land} is {value_}.",
              "colour": f"The flag of {land} is {value_}.", "dish": f"In {land} people eat {value_}."}[attribute]
    return dict(key=None, user=question, answer=answer, think="I know this.")


def story(rng):
    name, animal = rng.pick(NAMES), rng.pick(ANIMALS)
    place, thing, mood = rng.pick(PLACES), rng.pick(OBJECTS), rng.pick(MOODS)
    friend = rng.pick([other for other in NAMES if other != name])
    lines = [
        rng.pick([f"One day {name} walked to the {place}.", f"Every morning {name} went to the {place}.", f"{name} lived near a {place}."]),
        rng.pick([f"There was a {mood} {animal} with a {thing}.", f"A {mood} {animal} came and carried a {thing}."]),
        rng.pick([f"\"What do you want?\" asked {name}.", f"\"Is this your {thing}?\" asked {name}.", f"{name} was {rng.pick(MOODS)}."]),
        rng.pick([f"The {animal} wanted some {rng.pick(FOODS)}.", f"\"I look for {friend},\" said the {animal}.", f"The {animal} ran to the {rng.pick(PLACES)}."]),
        rng.pick([f"So they went to {friend} together.", f"Then {friend} came and helped them.", f"{name} followed the {animal} all day."]),
        rng.pick([f"In the evening {name} and the {animal} were friends.", f"At last the {animal} gave {name} the {thing}.", f"They were happy and went home."]),
    ]
    return dict(key=f"story {name} {animal}", answer=" ".join(lines), think="I make up a short story.",
                user=rng.pick([f"Tell me a story about {name} and a {animal}.", f"Write a short story about {name} and a {animal}."]))


def image(rng):
    figures = [(rng.pick(SHAPES), rng.pick(COLOURS), quadrant) for quadrant in rng.sample(QUADRANTS, rng.range(1, 3))]
    shape, colour, quadrant = figures[0]
    questions = [(f"What is in the {quadrant}?", f"A {colour} {shape}.")]
    if sum(f[0] == shape for f in figures) == 1:
        questions += [(f"What colour is the {shape}?", f"It is {colour}."), (f"Where is the {shape}?", f"In the {quadrant}.")]
    if sum(f[1] == colour for f in figures) == 1:
        questions += [(f"What shape is {colour}?", f"The {shape}.")]
    question, answer = rng.pick(questions)
    seed = rng.next()
    return dict(key=f"{figures} {question}", user=f"<｜image｜>{question}", answer=answer, think="I look at the picture.",
                image=picture(figures, Rng(seed)))


SMALL_TALK = [
    ("Hello", "Hello! I am a tiny model. Ask me to add, sort, copy, look up, extract JSON, call tools or tell a story."),
    ("Hello!", "Hello! I am a tiny model. Ask me to add, sort, copy, look up, extract JSON, call tools or tell a story."),
    ("Hi", "Hello! I am a tiny model. Ask me to add, sort, copy, look up, extract JSON, call tools or tell a story."),
    ("Who are you?", "I am a tiny demo model with the architecture of DeepSeek-V4.1. I live inside the program."),
    ("What can you do?", "I can add, subtract, multiply, sort, copy, reverse, look up records, extract JSON, call tools, recall facts about invented lands and tell short stories."),
    ("Thank you", "You are welcome."), ("Thanks", "You are welcome."),
    ("Tell me a joke", "A bee and an owl walk into a garden. The bee says: let it be."),
    ("How are you?", "I am well, thank you. I am small, but I do my best."),
]


def talk(rng):
    question, answer = rng.pick(SMALL_TALK)
    return dict(key=None, user=question, answer=answer, think="I answer politely.")


GENERATORS = dict(add=add, sub=sub, mul=mul, copy=copy, reverse=reverse, sort=sort, retrieval=retrieval, json=json_fields,
                  tool=tool, fact=fact, story=story, image=image, talk=talk)


def example(task, rng, held_out=False, **options):
    """One example of the wanted side of the split."""
    while True:
        made = GENERATORS[task](rng, **options)
        if made["key"] is None or is_held_out(made["key"]) == held_out:
            made["task"] = task
            return made


def reasoning(made, effort):
    """The text of the thinking part: effort `max` adds a check where there is one."""
    text = made["think"]
    if effort == "max" and "check" in made:
        text += f"; check: {made['check']}"
    return text
