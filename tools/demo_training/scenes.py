"""Drawn scenes, and the questions and answers about them.

A scene is one to four coloured shapes in different cells of a 3x3 grid. This file knows how to
invent one, draw it at any size, and ask about it with the true answer at hand; it also knows the
few questions that need no picture. It needs Pillow only, so tests and benchmarks can use it
without a tensor library.
"""

import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from PIL import Image, ImageDraw

CELLS = (
    "top-left", "top-centre", "top-right",
    "middle-left", "centre", "middle-right",
    "bottom-left", "bottom-centre", "bottom-right",
)  # fmt: skip
COLOURS = {
    "red": (214, 40, 40),
    "green": (46, 150, 60),
    "blue": (40, 90, 210),
    "yellow": (245, 205, 40),
    "purple": (135, 60, 165),
    "brown": (130, 80, 40),
    "pink": (245, 140, 185),
    "black": (30, 30, 30),
}
KINDS = ("circle", "square", "triangle", "star", "diamond", "heart")
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
)  # fmt: skip

CELL_UNITS = 28  # one cell of the grid, in the units that `draw` scales
TEST_SHARE = 10  # one scene in this many is kept out of training


@dataclass(frozen=True, order=True)
class Thing:
    """A coloured shape in a cell of the grid (0 to 8, in reading order)."""

    cell: int
    colour: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"

    @property
    def place(self) -> str:
        return CELLS[self.cell]


@dataclass(frozen=True)
class Scene:
    """Things in reading order. `look` seeds sizes, offsets and tints, which no answer depends on."""

    things: tuple[Thing, ...]
    look: int = field(default=0, repr=False)

    def is_held_out(self) -> bool:
        """Test scenes are held out by content: no other `look` of them is ever trained on."""
        return zlib.crc32(repr(self).encode()) % TEST_SHARE == 0


@dataclass(frozen=True)
class Question:
    """A question with its only right answer; `image` is None where no picture goes with it."""

    kind: str
    image: Image.Image | None
    text: str
    answer: str


def invent(rng: random.Random, most: int = 4) -> Scene:
    """A random scene. Colours and kinds repeat often enough that counting them is no formality."""
    count = max(rng.randint(1, most), rng.randint(1, most))  # few things make easy questions
    cells = sorted(rng.sample(range(len(CELLS)), count))
    things: list[Thing] = []
    for cell in cells:
        while True:
            colour, kind = rng.choice(list(COLOURS)), rng.choice(KINDS)
            copied = rng.random()
            if things and copied < 0.25:
                colour = rng.choice(things).colour
            elif things and copied < 0.5:
                kind = rng.choice(things).kind
            # No two things share colour and kind, so "the red star" always names one of them.
            if not any((t.colour, t.kind) == (colour, kind) for t in things):
                break
        things.append(Thing(cell, colour, kind))
    return Scene(tuple(things), look=rng.getrandbits(32))


def invent_for(rng: random.Random, held_out: bool) -> Scene:
    """A random scene from the test split or from the training split."""
    while True:
        scene = invent(rng)
        if scene.is_held_out() == held_out:
            return scene


def draw(scene: Scene, size: int = 336) -> Image.Image:
    """The scene as a square RGB picture, drawn at twice the size for smooth edges."""
    look = random.Random(scene.look)
    unit = 2 * size / (3 * CELL_UNITS)
    grey = look.randint(225, 255)
    image = Image.new("RGB", (2 * size, 2 * size), (grey, grey, grey))
    canvas = ImageDraw.Draw(image)
    for thing in scene.things:
        row, column = divmod(thing.cell, 3)
        radius = look.uniform(8, 11.5)
        slack = CELL_UNITS / 2 - radius - 1.5  # keeps the shape well inside its cell
        x = (column + 0.5) * CELL_UNITS + look.uniform(-slack, slack)
        y = (row + 0.5) * CELL_UNITS + look.uniform(-slack, slack)
        tint = tuple(min(255, max(0, c + look.randint(-12, 12))) for c in COLOURS[thing.colour])
        outline = [((x + dx * radius) * unit, (y + dy * radius) * unit) for dx, dy in OUTLINES[thing.kind]]
        canvas.polygon(outline, fill=tint)
    return image.reduce(2)


def _ring(points: int, inner: float = 1.0) -> list[tuple[float, float]]:
    """Points around the unit circle from the top on, every second one pulled in to `inner`."""
    turns = [(2 * math.pi * i / points, inner if i % 2 else 1.0) for i in range(points)]
    return [(r * math.sin(a), -r * math.cos(a)) for a, r in turns]


def _heart() -> list[tuple[float, float]]:
    """The usual parametric heart, scaled into the unit circle."""
    outline = []
    for i in range(48):
        a = 2 * math.pi * i / 48
        y = 13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)
        outline.append((math.sin(a) ** 3, -(y + 2.5) / 16))
    return outline


OUTLINES = {
    "circle": _ring(64),
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": [(0.0, -1.0), (1.0, 0.8), (-1.0, 0.8)],
    "star": _ring(10, inner=0.42),
    "diamond": [(0.0, -1.0), (0.65, 0.0), (0.0, 1.0), (-0.65, 0.0)],
    "heart": _heart(),
}

# An asker turns a scene into (question, answer), or None where the scene does not allow its question.
Asker = Callable[[random.Random, Scene], tuple[str, str] | None]


def join(phrases: list[str]) -> str:
    """English enumeration: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]]))


def _counted(number: int, noun: str) -> str:
    if number == 1:
        return f"There is one {noun}."
    return f"There are {NUMBERS[number] if number else 'no'} {noun}s."


def _describe(rng: random.Random, scene: Scene) -> tuple[str, str]:
    text = rng.choice(("Describe the picture.", "Describe the image.", "What do you see?", "What is in the picture?"))
    return text, f"There is {join([f'a {t.name} in the {t.place}' for t in scene.things])}."


def _count(rng: random.Random, scene: Scene) -> tuple[str, str]:
    text = rng.choice(("How many objects are there?", "How many objects do you see?"))
    return text, _counted(len(scene.things), "object")


def _count_colour(rng: random.Random, scene: Scene) -> tuple[str, str]:
    seen = [t.colour for t in scene.things]
    colour = rng.choice(seen if rng.random() < 0.7 else list(COLOURS))
    text = rng.choice(("How many {} objects are there?", "How many {} objects do you see?"))
    return text.format(colour), _counted(seen.count(colour), f"{colour} object")


def _count_kind(rng: random.Random, scene: Scene) -> tuple[str, str]:
    seen = [t.kind for t in scene.things]
    kind = rng.choice(seen if rng.random() < 0.7 else KINDS)
    text = rng.choice(("How many {}s are there?", "How many {}s do you see?"))
    return text.format(kind), _counted(seen.count(kind), kind)


def _colour(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    seen = [t.kind for t in scene.things]
    unique = [t for t in scene.things if seen.count(t.kind) == 1]
    if not unique:
        return None
    thing = rng.choice(unique)
    text = rng.choice(("What colour is the {}?", "What color is the {}?"))
    return text.format(thing.kind), f"The {thing.kind} is {thing.colour}."


def _where(rng: random.Random, scene: Scene) -> tuple[str, str]:
    thing = rng.choice(scene.things)
    return f"Where is the {thing.name}?", f"The {thing.name} is in the {thing.place}."


def _cell(rng: random.Random, scene: Scene) -> tuple[str, str]:
    taken = {t.cell: t for t in scene.things}
    cell = rng.choice(list(taken) if rng.random() < 0.7 else range(len(CELLS)))
    text = rng.choice(("What is in the {}?", "What do you see in the {}?"))
    content = f"a {taken[cell].name}" if cell in taken else "nothing"
    return text.format(CELLS[cell]), f"There is {content} in the {CELLS[cell]}."


def _exist(rng: random.Random, scene: Scene) -> tuple[str, str]:
    colours, kinds = {t.colour for t in scene.things}, {t.kind for t in scene.things}
    names = {t.name for t in scene.things}
    words = kinds | names
    if rng.random() < 0.5:
        name = rng.choice(sorted(words))
    elif rng.random() < 0.5:
        # The hard case: the right colour and the right kind, on two different things.
        name = f"{rng.choice(sorted(colours))} {rng.choice(sorted(kinds))}"
    else:
        name = rng.choice(("{1}", "{0} {1}")).format(rng.choice(list(COLOURS)), rng.choice(KINDS))
    text = rng.choice(("Is there a {}?", "Do you see a {}?")).format(name)
    return text, f"Yes, there is a {name}." if name in words else f"No, there is no {name}."


PICTURE_ASKERS: dict[str, Asker] = {
    "describe": _describe,
    "count": _count,
    "count_colour": _count_colour,
    "count_kind": _count_kind,
    "colour": _colour,
    "where": _where,
    "cell": _cell,
    "exist": _exist,
}

SMALL_TALK = (
    ("Hello.", "Hello! Show me a picture and ask me about it."),
    ("Hi!", "Hello! Show me a picture and ask me about it."),
    ("Who are you?", "I am a very small vision-language model."),
    ("What are you?", "I am a very small vision-language model."),
    ("What is your name?", "I have no name, I am only a demo."),
    ("What can you do?", "I can describe pictures of simple shapes and answer questions about them."),
    ("How are you?", "I am fine, thank you."),
    ("Are you a person?", "No, I am a very small model."),
    ("Can you see?", "Yes, I can see simple shapes."),
    ("Which shapes do you know?", f"I know the {join(list(KINDS))}."),
    ("Which colours do you know?", f"I know {join(list(COLOURS))}."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Good morning.", "Good morning! What shall we look at?"),
    ("Goodbye.", "Goodbye!"),
    ("Bye!", "Goodbye!"),
)
NO_PICTURE = "I see no picture. Please show me one."


def _small_talk(rng: random.Random) -> tuple[str, str]:
    choice = rng.random()
    if choice < 0.5:
        return rng.choice(SMALL_TALK)
    if choice < 0.75:
        last = rng.randint(2, 10)
        return f"Count to {NUMBERS[last]}.", f"{', '.join(NUMBERS[1 : last + 1]).capitalize()}."
    asker = rng.choice([_describe, _count, _count_colour, _count_kind, _where, _cell, _exist])
    question = asker(rng, invent(rng))
    return question[0], NO_PICTURE


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    if rng.random() < 0.5:
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}."
    first, second, total = NUMBERS[a], NUMBERS[b], NUMBERS[a + b]
    return f"What is {first} plus {second}?", f"{first.capitalize()} plus {second} is {total}."


TEXT_ASKERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {"small": _small_talk, "sum": _sum}
QUESTION_KINDS = (*PICTURE_ASKERS, *TEXT_ASKERS)


def ask(kind: str, rng: random.Random, scene: Scene | None = None) -> tuple[str, str] | None:
    """A question of this kind with its answer; None where the scene does not allow one."""
    if kind in TEXT_ASKERS:
        return TEXT_ASKERS[kind](rng)
    if scene is None:
        raise ValueError(f"a {kind} question needs a scene")
    return PICTURE_ASKERS[kind](rng, scene)


def held_out_scenes(rng: random.Random) -> Iterator[Scene]:
    """Endless scenes of the test split."""
    while True:
        yield invent_for(rng, held_out=True)


def held_out_questions(n: int, seed: int, size: int = 336) -> list[Question]:
    """`n` questions about held-out scenes, cycling over all kinds; the same for the same seed."""
    rng = random.Random(seed)
    questions = []
    for kind in itertools.islice(itertools.cycle(QUESTION_KINDS), n):
        if kind in TEXT_ASKERS:
            questions.append(Question(kind, None, *TEXT_ASKERS[kind](rng)))
            continue
        for scene in held_out_scenes(rng):
            question = ask(kind, rng, scene)
            if question is not None:
                questions.append(Question(kind, draw(scene, size), *question))
                break
    return questions
