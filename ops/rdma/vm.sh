#!/usr/bin/env bash
# Run a command in a small virtual machine that has two RDMA devices.
#
# usage: vm.sh [--timeout SECONDS] [--memory MIB] [--cpus N] [--verbose] COMMAND
#        vm.sh --prepare                      only build the image
#
# Boots a Debian kernel in qemu under software emulation, so that no hardware and no
# /dev/kvm is needed, with two Soft-RoCE devices: rxe0 (10.77.0.1) and rxe1 (10.77.1.1).
# This repository is mounted read-only at /share, which is the working directory. The
# guest's own files are gone when it stops. COMMAND, run by bash, writes to our stdout;
# its exit status is ours; 124: timed out; 125: this script or the guest failed.
#
# Needs Debian on x86-64 and root. KVTIDE_RDMA_CACHE is where the image is kept
# (default ~/.cache/kvtide/rdma).
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)
share=$(cd "$here/../.." && pwd)

die() { echo "ops/rdma: error: $*" >&2; exit 125; }
note() { echo "ops/rdma: $*" >&2; }

cache=${KVTIDE_RDMA_CACHE:-${HOME:-/root}/.cache/kvtide/rdma}
limit=600 memory=2048 cpus=2 verbose= prepare=
while [ $# -gt 0 ]; do
    case $1 in
        --timeout) limit=$2; shift 2 ;;
        --memory) memory=$2; shift 2 ;;
        --cpus) cpus=$2; shift 2 ;;
        --verbose) verbose=1; shift ;;
        --prepare) prepare=1; shift ;;
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
        -*) die "unknown option $1 (see --help)" ;;
        *) break ;;
    esac
done
[ -n "$prepare" ] || [ $# -eq 1 ] || die "needs one COMMAND (see --help)"
case $share in *,*) die "the repository's path must have no comma: $share" ;; esac

image=$("$here/image.sh" "$cache")
[ -z "$prepare" ] || { echo "$image"; exit 0; }

run=$(mktemp -d "${TMPDIR:-/tmp}/kvtide-rdma.XXXXXX")
qemu= reader=
cleanup() {
    [ -z "$verbose" ] || cat "$run/console" >&2 2>/dev/null || true
    [ -z "$qemu$reader" ] || kill $qemu $reader 2>/dev/null || true
    rm -rf "$run"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

mkdir "$run/init"
{
    echo 'cd /share; ulimit -l unlimited'
    echo 'export HOME=/root LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1'
    echo 'export PYTHONPATH=/site:$(echo /share/libs/* /share/services/* | tr " " :)'
    printf 'exec bash -c %q\n' "$1"
} >"$run/init/run.sh"
(cd "$run/init" && find . | "$image/busybox" cpio -o -H newc 2>/dev/null) >"$run/run.cpio"
cat "$image/initrd" "$run/run.cpio" >"$run/initrd"

loglevel=quiet
[ -z "$verbose" ] || loglevel=loglevel=7
# A FIFO and cat instead of qemu's stdio: that would make our stdout non-blocking, and
# on an input at its end it tells the guest that the port is closed.
mkfifo "$run/out"
exec 8<>"$run/out"
cat "$run/out" 8>&- &
reader=$!
# mapping "none" of 9p: the guest reads as the root that qemu runs as
qemu-system-x86_64 -nodefaults -no-user-config -display none -no-reboot \
    -machine q35 -accel tcg,thread=multi -cpu max -smp "$cpus" -m "$memory" \
    -kernel "$image/kernel" -initrd "$run/initrd" \
    -append "console=ttyS0 $loglevel panic=-1 mitigations=off nokaslr tsc=reliable audit=0 apparmor=0 cryptomgr.notests" \
    -serial "file:$run/console" \
    -drive "if=none,id=root,format=raw,readonly=on,file=$image/root.img" \
    -device virtio-blk-pci,drive=root \
    -device virtio-rng-pci -device virtio-serial-pci \
    -chardev "file,id=out,path=$run/out" -device virtserialport,chardev=out,name=out \
    -chardev "file,id=status,path=$run/status" -device virtserialport,chardev=status,name=status \
    -virtfs "local,path=$share,mount_tag=share,security_model=none,multidevs=remap,readonly=on" \
    -virtfs "local,path=$(realpath "$image/site"),mount_tag=site,security_model=none,multidevs=remap,readonly=on" \
    </dev/null 2>"$run/qemu.err" 8>&- &
qemu=$!
deadline=$((SECONDS + limit))
while kill -0 "$qemu" 2>/dev/null; do
    if [ $SECONDS -ge $deadline ]; then
        note "timed out after $limit s"
        exit 124
    fi
    sleep 0.1
done
wait "$qemu" || true
qemu=
exec 8>&-
wait "$reader" || true
reader=
[ -z "$verbose" ] || note "guest $(grep ^ready "$run/status" 2>/dev/null || echo 'never ready')"
rc=$(sed -n 's/^rc //p' "$run/status" 2>/dev/null | tail -n 1)
[ -z "$rc" ] || exit "$rc"
cat "$run/qemu.err" >&2
[ ! -f "$run/console" ] || tail -n 30 "$run/console" >&2
die "the guest stopped without handing back a status"
