"""Block hashes name content: equal content, equal hash; any difference in or before a block, another hash."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.cache.hashes import chain_seed, extend_chain, feature_hashes, feature_key
from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.request import ImageItem, RopeSpan


def image(start: int, count: int, name: int = 0, rope: RopeSpan | None = None) -> ImageItem:
    return ImageItem(ImageDigest(bytes([name]) * 32), 1, 1, count, count, start, (1, 1, count), rope)


def hashes(tokens, images=(), size=4, salt=""):
    chain = []
    extend_chain(chain, tuple(tokens), images, block_size=size, cache_salt=salt)
    return tuple(chain)


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(h) == 32 for h in hashes(range(8)))


def test_the_hashes_of_a_prefix_are_a_prefix_of_the_hashes() -> None:
    long = hashes(range(20), [image(5, 9)])
    for count in range(20):
        assert hashes(range(count), [image(5, 9)]) == long[: count // 4]


def test_a_change_in_one_block_changes_it_and_all_after_it() -> None:
    first = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    second = hashes([1, 2, 3, 4, 5, 6, 0, 8, 9, 10, 11, 12])
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False]


def test_equal_blocks_at_different_places_differ() -> None:
    assert len(set(hashes([7] * 16))) == 4


def test_the_same_tokens_shifted_by_one_share_nothing() -> None:
    assert not set(hashes(range(16))) & set(hashes([99, *range(16)]))


def test_a_different_image_behind_the_same_placeholders_differs() -> None:
    tokens = [1, 1, 0, 0, 0, 0, 1, 1]
    first, second = hashes(tokens, [image(2, 4, name=1)]), hashes(tokens, [image(2, 4, name=2)])
    assert first[0] != second[0] and first[1] != second[1]
    assert first == hashes(tokens, [image(2, 4, name=1)])


def test_the_offset_inside_an_image_matters() -> None:
    """The same block of placeholders taken from two places of one picture."""
    whole = hashes([0] * 8, [image(0, 8)])
    assert hashes([0] * 4, [image(-4, 8)])[0] != whole[0]


def test_placeholder_ids_inside_a_span_do_not_matter_but_typed_ones_do() -> None:
    assert hashes([5] * 4, [image(0, 4)]) == hashes([6] * 4, [image(0, 4)])
    assert hashes([5] * 4) != hashes([5] * 4, [image(0, 4)])


def test_two_short_images_differ_from_one_long_one() -> None:
    assert hashes([0] * 4, [image(0, 2), image(2, 2)]) != hashes([0] * 4, [image(0, 4)])


def test_salt_and_block_size_separate_chains() -> None:
    assert not set(hashes(range(8), salt="a")) & set(hashes(range(8), salt="b"))
    assert not set(hashes(range(8), salt="a")) & set(hashes(range(8)))
    assert chain_seed(4) != chain_seed(8)
    assert chain_seed(4, "\ud800") != chain_seed(4)  # a salt need not be encodable text


def test_the_same_picture_at_other_rotary_positions_differs_and_so_does_the_text_behind_it() -> None:
    def of(rope: RopeSpan | None):
        return hashes([0] * 4 + [1] * 4, [image(0, 4, rope=rope)])

    ropes = [None, *(RopeSpan(*(int(i == changed) for i in range(5))) for changed in range(6))]
    first, behind = zip(*(of(rope) for rope in ropes), strict=True)
    assert len(set(first)) == len(set(behind)) == len(ropes)


def test_the_features_of_a_picture_have_one_name_per_block_under_their_salt() -> None:
    one, other = ImageDigest(b"1" * 32), ImageDigest(b"2" * 32)
    keys = [feature_key(one), feature_key(other), feature_key(one, "salt")]
    names = [list(feature_hashes(key, 3)) for key in keys]
    assert len({name for some in names for name in some}) == 9
    assert names[0] == list(feature_hashes(feature_key(one), 3)) and names[0][:2] == list(feature_hashes(keys[0], 2))


CONTENTS = st.lists(st.one_of(st.integers(0, 2), st.tuples(st.integers(0, 1), st.integers(1, 3))), max_size=6)


def laid_out(parts):
    """(tokens, images, what each position is) for parts that are a token id or (image name, length)."""
    tokens, images, identity = [], [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            identity.append(("text", part))
        else:
            name, count = part
            images.append(image(len(tokens), count, name))
            tokens += [9] * count
            identity += [("image", name, offset) for offset in range(count)]
    return tokens, images, identity


@given(CONTENTS, CONTENTS)
def test_hashes_are_equal_exactly_where_the_contents_up_to_there_are(one, two) -> None:
    tokens1, images1, what1 = laid_out(one)
    tokens2, images2, what2 = laid_out(two)
    hashes1, hashes2 = hashes(tokens1, images1, size=2), hashes(tokens2, images2, size=2)
    for block in range(min(len(hashes1), len(hashes2))):
        same_content = what1[: 2 * block + 2] == what2[: 2 * block + 2]
        assert (hashes1[block] == hashes2[block]) == same_content


@given(CONTENTS, st.lists(st.integers(0, 12), max_size=5), st.sampled_from(["", "salt"]))
def test_a_chain_extended_in_pieces_is_the_chain_computed_at_once(parts, stops, salt) -> None:
    tokens, images, _ = laid_out(parts)
    chain: list = []
    for stop in sorted(stops):
        extend_chain(chain, tokens[2 * len(chain) : stop], images, block_size=2, cache_salt=salt)
        assert tuple(chain) == hashes(tokens[: max(stop, 2 * len(chain))], images, size=2, salt=salt)
    extend_chain(chain, tokens[2 * len(chain) :], images, block_size=2, cache_salt=salt)
    assert tuple(chain) == hashes(tokens, images, size=2, salt=salt)
