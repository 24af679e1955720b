#!/bin/bash
# Starts a program N times, each with the variables that a launcher sets: launch.sh torchrun|openmpi|mpich|srun N COMMAND ...
# The launchers themselves are not needed; `make launchers` runs those that pip has. Ends as the first rank that fails, or
# with 0. A line of output is prefixed by nothing: the ranks above 0 of the examples are silent.
by=$1 n=$2
shift 2
port=${TE_LAUNCH_PORT:-$((20000 + $$ % 10000))}
pids=()
for ((i = 0; i < n; i++)); do
    case $by in
    torchrun) variables="RANK=$i WORLD_SIZE=$n LOCAL_RANK=$i LOCAL_WORLD_SIZE=$n GROUP_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port TORCHELASTIC_RUN_ID=none" ;;
    openmpi) variables="OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_SIZE=$n OMPI_COMM_WORLD_LOCAL_RANK=$i OMPI_COMM_WORLD_LOCAL_SIZE=$n PMIX_NAMESPACE=prterun-$$@1" ;;
    mpich) variables="PMI_RANK=$i PMI_SIZE=$n MPI_LOCALRANKID=$i MPI_LOCALNRANKS=$n PMI_JOBID=$$" ;;
    srun) variables="SLURM_PROCID=$i SLURM_NTASKS=$n SLURM_LOCALID=$i SLURM_NNODES=1 SLURM_STEP_NUM_NODES=1 SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_STEP_NODELIST=$(hostname)" ;;
    *) echo "launch.sh: $by: there are torchrun, openmpi, mpich and srun" >&2; exit 2 ;;
    esac
    env $variables "$@" </dev/null &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
    wait "$pid"
    ended=$?
    [ $status != 0 ] || status=$ended
done
exit $status
