"""An instance process on an emulated device of its own, in place of `hydra_engine.cluster.process`: what a device would
punish while it serves goes into a file of the folder that FINDINGS names. Ends with the code of the instance."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hydra_engine.cluster import process
from hydra_engine.instance.instance import Instance
from tests.emulated.conftest import MAY_WAIT
from tests.emulated.cuda import emulated_cuda

FINDINGS = "EMULATED_FINDINGS"


def main() -> int:
    with emulated_cuda(total_bytes=16 << 30) as streams:
        run = Instance.run

        def serve(self: Instance) -> None:
            streams.serving = True
            run(self)
            streams.serving = False

        Instance.run = serve  # type: ignore[method-assign]
        code = process.main()
    lines = [f"{found.place}: {found.what}" for found in streams.findings if found.function not in MAY_WAIT]
    (Path(os.environ[FINDINGS]) / f"{os.getpid()}.txt").write_text("\n".join(lines), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
