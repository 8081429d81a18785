# Makes vLLM, FlashAttention-4 and this checkout importable on a GPU host without a network, from
# archives in /tmp/bundle: stock vLLM (vllm.tar.xz.*), the packages it misses there (site.tar.xz.*)
# and, for FlashAttention-4, its compiler (dsl.tar.xz.*) and itself (fa4.tar.xz.*). Sourced in the
# checkout's root; unpacks what has come since the last time.
mkdir -p /tmp/site
for name in vllm site dsl fa4; do
    if [ -e "/tmp/bundle/$name.tar.xz.0" ] && [ ! -e "/tmp/site/.$name" ]; then
        cat /tmp/bundle/$name.tar.xz.* | tar xJ -C /tmp/site && touch "/tmp/site/.$name"
    fi
done
# What an installation would leave, so that vLLM finds the plugins and the program has a version.
python3 - <<'END'
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
info = Path("/tmp/site", f"vllm_dllm-{project['version']}.dist-info")
info.mkdir(exist_ok=True)
described = f"Metadata-Version: 2.1\nName: vllm-dllm\nVersion: {project['version']}\n"
(info / "METADATA").write_text(described)
groups = [("console_scripts", project["scripts"]), *project["entry-points"].items()]
lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in groups]
(info / "entry_points.txt").write_text("\n".join(lines))
END
export PYTHONPATH="$PWD:/tmp/site:/tmp/site/nvidia_cutlass_dsl/dsl_packages"
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
