#!/bin/sh
# install.sh PYTHON FOLDER: what models.py imports, into a folder of its own (PYTHONPATH), in the versions of requirements.txt.
#
# The package index has torch for CUDA alone, which names CUDA's libraries as its own: 5 GB, of which nothing runs on the CPU. So they stay away. The loader asks for their names,
# and torch at its start for the runtime's; the others become libraries of the same names and functions, which all fail.
python=$1
rm -rf "$2"
folder=$(mkdir -p "$2" && cd "$2" && pwd) || exit 1
log=$folder.log
cd "$(dirname "$0")" || exit 1
fail() {
    echo "tools/models/install.sh: $1" >&2
    [ ! -s "$log" ] || tail -5 "$log" >&2
    rm -rf "$folder"
    exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$("$python" --version): transformers and numpy of requirements.txt need Python 3.11 or later"
for tool in ldd nm gcc; do command -v $tool >/dev/null || fail "$tool is missing"; done
"$python" -m pip install -q --no-deps --no-compile --disable-pip-version-check --target "$folder" -r requirements.txt >"$log" 2>&1 || fail 'the packages of requirements.txt cannot be had (pip):'

lib=$folder/torch/lib
{
    nm -D --undefined-only "$lib"/*.so 2>/dev/null | sed -n 's/.* U \([A-Za-z0-9_]*\).*/\1/p' | grep -E '^(cublas|cudnn|cufft|cuFile|cupti|cusolver|cusparse|nccl|nvJitLink|nvrtc|nvshmem)' | sort -u |
        sed 's/.*/int &(void) { return 1; }/'
} >"$folder/absent.c"
for name in $(ldd "$lib"/libtorch_python.so "$lib"/libtorch_cuda.so 2>/dev/null | sed -n 's/^[[:space:]]*\(lib[^ ]*\) => not found/\1/p' | sort -u); do
    gcc -shared -fPIC -w -Wl,-soname,"$name" -o "$lib/$name" "$folder/absent.c" 2>"$log" || fail "gcc cannot build $name:"
done
PYTHONPATH=$folder "$python" -c 'import torch, transformers; assert torch.randn(2, 3).sum().isfinite()' 2>"$log" || fail 'torch does not start:'
