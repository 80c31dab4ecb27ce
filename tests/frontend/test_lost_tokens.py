"""A token that was sampled, and lost with the instance that sampled it, while the next instance went on from it."""

from __future__ import annotations

import pytest

from hydra_engine.core.messages import Submit
from hydra_engine.core.outputs import Departure, FinishReason
from tests.frontend.rig import Rig

LENGTH, MOVED = FinishReason.LENGTH, Departure.MOVED


@pytest.mark.parametrize("loss", ["death", "silence"])
@pytest.mark.parametrize("has_finished", [False, True])
def test_a_first_token_that_nobody_can_tell_any_more_is_sampled_again(loss: str, has_finished: bool) -> None:
    rig = Rig("P+D")
    rig.submit(1)
    request = rig.submitted("p0").request
    rig.take("d0")
    rig.speak("d0", request, 1, 2, 3)  # it has the KV and the first token from p0 directly
    if has_finished:
        rig.finish("d0", request.id, LENGTH, 4)
    if loss == "death":
        rig.down("p0")
        rig.up("p0")
    else:
        rig.silent("p0")
        assert rig.aborted("p0") == [request.id]
        rig.silent("p0", False)
    assert not rig.handles[1].done
    again = [message.request for message in rig.take("p0") if isinstance(message, Submit)][-1]
    assert again.id != request.id and again.generated_token_ids == ()
    rig.speak("p0", again, 0)
    rig.finish("p0", again.id, MOVED, 1)
    rig.speak("d0", again, 1, 2, 3)
    rig.finish("d0", again.id, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.assert_at_rest()
