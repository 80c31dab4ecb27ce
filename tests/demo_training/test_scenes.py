"""The scene generator: reproducible, honest about what is held out, and right in its answers."""

import random

import pytest

from tools.demo_training.scenes import (
    CELLS,
    COLOURS,
    KINDS,
    NUMBERS,
    PICTURE_ASKERS,
    QUESTION_KINDS,
    Scene,
    Thing,
    ask,
    draw,
    held_out_questions,
    held_out_scenes,
    invent,
    invent_for,
    join,
)

SCENE = Scene((Thing(0, "red", "star"), Thing(4, "blue", "star"), Thing(5, "red", "heart")))


def answers(kind: str, scene: Scene, tries: int = 200) -> dict[str, str]:
    """Many questions of a kind about one scene, with their answers."""
    rng = random.Random(0)
    asked = (ask(kind, rng, scene) for _ in range(tries))
    return dict(pair for pair in asked if pair is not None)


def test_held_out_questions_are_reproducible() -> None:
    first, second = held_out_questions(30, seed=3), held_out_questions(30, seed=3)
    assert [(q.kind, q.text, q.answer) for q in first] == [(q.kind, q.text, q.answer) for q in second]
    for a, b in zip(first, second, strict=True):
        assert (a.image is None) == (b.image is None)
        assert a.image is None or a.image.tobytes() == b.image.tobytes()
    assert [q.text for q in first] != [q.text for q in held_out_questions(30, seed=4)]


def test_held_out_questions_cycle_over_all_kinds() -> None:
    questions = held_out_questions(2 * len(QUESTION_KINDS), seed=0, size=84)
    assert [q.kind for q in questions] == [*QUESTION_KINDS, *QUESTION_KINDS]
    for question in questions:
        assert (question.image is not None) == (question.kind in PICTURE_ASKERS)


def test_training_and_test_scenes_share_no_content() -> None:
    rng = random.Random(0)
    trained = {invent_for(rng, held_out=False).things for _ in range(2000)}
    scenes = held_out_scenes(rng)
    tested = {next(scenes).things for _ in range(500)}
    assert not trained & tested


def test_the_look_of_a_scene_does_not_move_it_between_the_splits() -> None:
    rng = random.Random(0)
    for _ in range(100):
        scene = invent(rng)
        assert Scene(scene.things, look=rng.getrandbits(32)).is_held_out() == scene.is_held_out()


def test_invented_things_are_distinct_and_in_reading_order() -> None:
    rng = random.Random(0)
    for _ in range(500):
        things = invent(rng).things
        assert 1 <= len(things) <= 4
        assert [t.cell for t in things] == sorted({t.cell for t in things})
        assert len({t.name for t in things}) == len(things)


@pytest.mark.parametrize("size", [84, 252, 336])
def test_things_are_drawn_in_their_cell_and_colour(size: int) -> None:
    scene = Scene(tuple(Thing(cell, "black", kind) for cell, kind in zip((0, 2, 3, 4, 7, 8), KINDS, strict=True)))
    image = draw(scene, size)
    assert image.size == (size, size) and image.mode == "RGB"
    third = size // 3
    for cell in range(len(CELLS)):
        row, column = divmod(cell, 3)
        patch = image.crop((column * third, row * third, (column + 1) * third, (row + 1) * third))
        darkest, _ = patch.convert("L").getextrema()
        assert (darkest < 64) == (cell in {t.cell for t in scene.things})


def test_the_same_scene_is_drawn_alike_and_another_look_differs() -> None:
    assert draw(SCENE, 84).tobytes() == draw(SCENE, 84).tobytes()
    assert draw(SCENE, 84).tobytes() != draw(Scene(SCENE.things, look=1), 84).tobytes()


def test_describe_names_everything_in_reading_order() -> None:
    assert set(answers("describe", SCENE).values()) == {
        "There is a red star in the top-left, a blue star in the centre and a red heart in the middle-right."
    }


def test_counts() -> None:
    assert set(answers("count", SCENE).values()) == {"There are three objects."}
    colours = answers("count_colour", SCENE)
    assert colours["How many red objects are there?"] == "There are two red objects."
    assert colours["How many green objects are there?"] == "There are no green objects."
    kinds = answers("count_kind", SCENE)
    assert kinds["How many hearts do you see?"] == "There is one heart."
    assert kinds["How many circles do you see?"] == "There are no circles."


def test_colour_is_asked_only_of_the_only_thing_of_its_kind() -> None:
    assert set(answers("colour", SCENE).values()) == {"The heart is red."}
    assert not answers("colour", Scene(SCENE.things[:2]))


def test_where_and_cell() -> None:
    assert answers("where", SCENE)["Where is the blue star?"] == "The blue star is in the centre."
    cells = answers("cell", SCENE)
    assert cells["What is in the top-left?"] == "There is a red star in the top-left."
    assert cells["What is in the bottom-left?"] == "There is nothing in the bottom-left."


def test_exist_tells_combinations_from_their_parts() -> None:
    asked = answers("exist", SCENE, tries=1000)
    assert asked["Is there a red star?"] == "Yes, there is a red star."
    assert asked["Is there a blue heart?"] == "No, there is no blue heart."
    for answer in asked.values():
        name = answer.rstrip(".").split(" a " if answer.startswith("Yes") else " no ")[-1]
        assert answer.startswith("Yes") == any(t.name.endswith(name) for t in SCENE.things)


def test_sums() -> None:
    rng = random.Random(0)
    for _ in range(300):
        question, answer = ask("sum", rng)
        numbers = [
            int(word) if word.isdigit() else NUMBERS.index(word)
            for word in answer.lower().rstrip(".").split()
            if word.isdigit() or word in NUMBERS
        ]
        assert numbers[0] + numbers[1] == numbers[2], (question, answer)


def test_picture_questions_need_a_scene() -> None:
    with pytest.raises(ValueError, match="needs a scene"):
        ask("count", random.Random(0))


def test_join() -> None:
    assert join(["a"]) == "a"
    assert join(["a", "b"]) == "a and b"
    assert join(["a", "b", "c"]) == "a, b and c"


def test_every_colour_and_kind_occurs() -> None:
    rng = random.Random(0)
    things = [t for _ in range(500) for t in invent(rng).things]
    assert {t.colour for t in things} == set(COLOURS)
    assert {t.kind for t in things} == set(KINDS)
