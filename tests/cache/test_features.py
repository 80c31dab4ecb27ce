"""Image features by content, against a model: who uses what, what is still there, and which blocks may be read."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.cache.features import FeatureCache
from hydra_engine.cache.ledger import check_features
from hydra_engine.core.ids import FeatureKey, RequestId
from hydra_engine.core.state import ImageProgress
from tests.examples import examples

WAITING, ENCODING, ENCODED = ImageProgress.WAITING, ImageProgress.ENCODING, ImageProgress.ENCODED
SIZES = {FeatureKey(b"a"): 3, FeatureKey(b"b"): 8, FeatureKey(b"c"): 13}  # tokens; 1, 2 and 4 blocks
A, B, C = SIZES


def user(number: int, image: int = 0) -> tuple[RequestId, int]:
    return RequestId(number), image


def cache(num_blocks: int = 8, **kwargs) -> FeatureCache:
    return FeatureCache(CacheManager(num_blocks, 4), **kwargs)


class FeatureMachine(RuleBasedStateMachine):
    """The model writes into a memory of blocks: whoever reads features must read what was written for that picture."""

    @initialize(num_blocks=st.integers(4, 9), keeps=st.booleans())
    def start(self, num_blocks: int, keeps: bool) -> None:
        self.keeps = keeps
        self.cache = cache(num_blocks, keeps=keeps)
        self.memory: dict[int, tuple[FeatureKey, int]] = {}
        self.users: dict[FeatureKey, list] = {key: [] for key in SIZES}
        self.progress: dict[FeatureKey, ImageProgress] = {}
        self.count = 0

    def blocks(self, key: FeatureKey) -> list[int]:
        return self.cache.block_ids(key).tolist()

    def is_whole(self, key: FeatureKey) -> bool:
        pieces = set(self.memory.values())
        return all((key, index) in pieces for index in range(-(-SIZES[key] // 4)))

    @rule(key=st.sampled_from(list(SIZES)))
    def need(self, key: FeatureKey) -> None:
        if not self.keeps and key in self.progress:
            return  # without reuse no two images have one key
        self.count += 1
        if key not in self.progress:
            self.progress[key] = ENCODED if self.keeps and self.is_whole(key) else WAITING
        assert self.cache.need(user(self.count), key, SIZES[key]) == self.progress[key]
        self.users[key].append(user(self.count))

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def drop(self, data) -> None:
        key = data.draw(st.sampled_from([k for k, users in self.users.items() if users]))
        someone = data.draw(st.sampled_from(self.users[key]))
        self.users[key].remove(someone)
        self.cache.drop(someone, key)
        self.forget_unused(key)

    def forget_unused(self, key: FeatureKey) -> None:
        if not self.users[key] and self.progress[key] != ENCODING:
            del self.progress[key]

    @precondition(lambda self: WAITING in self.progress.values())
    @rule(data=st.data())
    def reserve(self, data) -> None:
        key = data.draw(st.sampled_from([k for k, p in self.progress.items() if p == WAITING]))
        fits = self.cache.pool.num_free >= -(-SIZES[key] // 4)
        assert self.cache.reserve(key) is fits
        if fits:
            self.progress[key] = ENCODING
            for index, block in enumerate(self.blocks(key)):
                self.memory.pop(block, None)
                self.memory = {b: piece for b, piece in self.memory.items() if piece != (key, index)}

    @precondition(lambda self: ENCODING in self.progress.values())
    @rule(data=st.data(), failed=st.booleans())
    def finish(self, data, failed: bool) -> None:
        key = data.draw(st.sampled_from([k for k, p in self.progress.items() if p == ENCODING]))
        if not failed:
            self.memory |= {block: (key, index) for index, block in enumerate(self.blocks(key))}
        self.cache.finish(key, failed=failed)
        self.progress[key] = WAITING if failed else ENCODED
        self.forget_unused(key)

    @precondition(lambda self: ENCODED in self.progress.values())
    @rule(data=st.data())
    def evict(self, data) -> None:
        key = data.draw(st.sampled_from([k for k, p in self.progress.items() if p == ENCODED]))
        self.cache.evict(key)
        self.progress[key] = WAITING
        self.memory = {b: piece for b, piece in self.memory.items() if piece[0] != key}

    @rule()
    def forget_what_nobody_needs(self) -> None:
        self.cache.pool.forget_evictable()
        self.memory = {b: piece for b, piece in self.memory.items() if self.progress.get(piece[0]) == ENCODED}

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_features(self.cache)
        held = {key for key, p in self.progress.items() if p != WAITING}
        assert {key: p for key, p, _ in self.cache.held_blocks()} == {key: self.progress[key] for key in held}
        assert self.cache.pool.num_held == sum(-(-SIZES[key] // 4) for key in held), "at rest everything is free"
        assert sum(len(entry.users) for entry in self.cache._entries.values()) == sum(map(len, self.users.values()))
        for key, progress in self.progress.items():
            assert self.cache.progress(key) == progress
            assert list(self.cache.users(key)) == self.users[key]
            if progress == ENCODED:
                assert [self.memory[b] for b in self.blocks(key)] == [(key, i) for i in range(len(self.blocks(key)))]


TestFeatureMachine = FeatureMachine.TestCase
TestFeatureMachine.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)


def encoded(features: FeatureCache, key: FeatureKey, number: int) -> list[int]:
    assert features.need(user(number), key, SIZES[key]) == WAITING and features.reserve(key)
    features.finish(key, failed=False)
    return features.block_ids(key).tolist()


def test_features_without_users_are_found_until_their_blocks_are_needed() -> None:
    features = cache(6)
    blocks = encoded(features, C, 1)
    features.drop(user(1), C)
    assert (features.pool.num_held, features.pool.num_free) == (0, 6)
    assert features.need(user(2), C, SIZES[C]) == ENCODED
    assert features.block_ids(C).tolist() == blocks and features.pool.num_held == 4
    features.drop(user(2), C)
    encoded(features, B, 3)
    features.drop(user(3), B)
    encoded(features, A, 4)
    assert features.need(user(5), C, SIZES[C]) == WAITING, "one block was evicted, so all of it must be encoded"
    assert features.need(user(6), B, SIZES[B]) == ENCODED
    check_features(features)


def test_a_reset_takes_what_nobody_needs_and_nothing_else() -> None:
    features = cache()
    encoded(features, A, 1)
    blocks = encoded(features, B, 2)
    features.drop(user(1), A)
    features.pool.forget_evictable()
    check_features(features)
    assert features.need(user(3), A, SIZES[A]) == WAITING
    assert features.need(user(4), B, SIZES[B]) == ENCODED and features.block_ids(B).tolist() == blocks


def test_what_is_used_last_is_evicted_last() -> None:
    features = cache(4)
    encoded(features, B, 1)
    features.drop(user(1), B)
    encoded(features, A, 2)
    features.drop(user(2), A)
    features.need(user(3), B, SIZES[B])
    features.drop(user(3), B)
    features.need(user(4), FeatureKey(b"x"), 8)
    features.reserve(FeatureKey(b"x"))
    assert features.need(user(5), B, SIZES[B]) == ENCODED
    assert features.need(user(6), A, SIZES[A]) == WAITING


def test_features_that_were_evicted_are_not_found_although_nobody_has_written_there() -> None:
    features = cache()
    encoded(features, B, 1)
    features.evict(B)
    assert features.progress(B) == WAITING and features.pool.num_held == 0
    features.drop(user(1), B)
    assert features.need(user(2), B, SIZES[B]) == WAITING


def test_a_failed_encode_leaves_nothing_and_its_users_wait_again() -> None:
    features = cache()
    for number in (1, 2):
        features.need(user(number), B, SIZES[B])
    features.reserve(B)
    assert features.need(user(3), B, SIZES[B]) == ENCODING
    features.finish(B, failed=True)
    assert features.progress(B) == WAITING and features.users(B) == (user(1), user(2), user(3))
    assert features.pool.num_held == 0


@pytest.mark.parametrize("failed", [True, False])
def test_an_encode_outlives_its_users(failed: bool) -> None:
    features = cache()
    features.need(user(1), B, SIZES[B])
    features.reserve(B)
    features.drop(user(1), B)
    assert features.pool.num_held == 2, "a plan in flight writes there"
    features.finish(B, failed=failed)
    assert features.pool.num_held == 0
    assert features.need(user(2), B, SIZES[B]) == (WAITING if failed else ENCODED)


def test_keys_that_are_not_kept_are_not_found_again() -> None:
    features = cache(keeps=False)
    encoded(features, B, 1)
    features.drop(user(1), B)
    assert features.need(user(2), B, SIZES[B]) == WAITING


def test_damage_is_noticed() -> None:
    features = cache()
    encoded(features, B, 1)
    features._entries[B].users.clear()
    with pytest.raises(AssertionError, match="held for no image"):
        check_features(features)
    features._entries[B].users[user(1)] = None
    features._entries[B].progress = WAITING
    with pytest.raises(AssertionError, match="entries and blocks disagree"):
        check_features(features)
    features._entries[B].progress = ENCODED
    features.pool._forget_hash(features.block_ids(B).tolist()[1])
    with pytest.raises(AssertionError, match="cannot be found"):
        check_features(features)
