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
# What an installation would leave, so that vLLM finds the plugin.
info=/tmp/site/vllm_dllm-0.1.0.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm-dllm\nVersion: 0.1.0\n' > "$info/METADATA"
printf '[vllm.general_plugins]\nvllm_dllm = vllm_dllm.plugin:register\n' > "$info/entry_points.txt"
export PYTHONPATH="$PWD:/tmp/site:/tmp/site/nvidia_cutlass_dsl/dsl_packages"
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
