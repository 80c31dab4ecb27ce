"""Cases of all families with a native model."""

from tests.models.families.base import FamilyCase
from tests.models.families.internvl import INTERNVL, INTERNVL_CHAT
from tests.models.families.llava import LLAVA, LLAVA_ORIGINAL
from tests.models.families.llava_next import LLAVA_NEXT, LLAVA_NEXT_ORIGINAL
from tests.models.families.minicpmv import MINICPMV
from tests.models.families.minicpmv2_6 import MINICPMV_2_6
from tests.models.families.openpangu import OPENPANGU
from tests.models.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from tests.models.families.qwen3_vl import QWEN3_5, QWEN3_5_MOE, QWEN3_VL, QWEN3_VL_MOE

CASES: dict[str, FamilyCase] = {
    case.family: case
    for case in (
        LLAVA,
        LLAVA_NEXT,
        LLAVA_ORIGINAL,
        LLAVA_NEXT_ORIGINAL,
        INTERNVL,
        INTERNVL_CHAT,
        MINICPMV_2_6,
        MINICPMV,
        OPENPANGU,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_5,
        QWEN3_VL_MOE,
        QWEN3_5_MOE,
    )
}
