#!/usr/bin/env bash
# Build the virtual machine's kernel, root image and Python packages, once.
#
# usage: image.sh CACHE_DIR          prints the folder of the image
#
# Needs root, x86-64 and apt on Debian 12. Missing tools (qemu, debootstrap,
# busybox-static, e2fsprogs) are installed by apt-get. A lock makes several callers
# wait for one build; a changed script builds anew. MIRROR names another Debian mirror.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

die() { echo "ops/rdma: error: $*" >&2; exit 125; }
note() { echo "ops/rdma: $*" >&2; }

[ $# -eq 1 ] || die "usage: image.sh CACHE_DIR"
[ "$(uname -m)" = x86_64 ] || die "needs an x86-64 host, this is $(uname -m)"
[ "$(id -u)" = 0 ] || die "needs root (apt, debootstrap)"
mkdir -p "$1" || die "cannot make the cache folder $1"
cache=$(realpath "$1")

packages=python3,python3-pyverbs,rdma-core,ibverbs-providers,ibverbs-utils,perftest,iproute2,kmod,procps
modules="virtio_pci virtio_blk virtio_console virtio_rng crc32c_generic ext4 overlay 9p
    9pnet_virtio dummy veth crc32_generic crc32_pclmul ib_uverbs rdma_ucm rdma_rxe"
# what kvtide.transfer imports, and what its tests need; versions from constraints.txt
python_packages="xxhash msgspec pydantic-settings structlog prometheus-client pytest pytest-timeout anyio hypothesis"

export DEBIAN_FRONTEND=noninteractive
install_tools() {
    local missing=()
    command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    command -v mke2fs >/dev/null || missing+=(e2fsprogs)
    static_busybox >/dev/null || missing+=(busybox-static)
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || die "missing, and no apt-get: ${missing[*]}"
    note "installing ${missing[*]}"
    apt-get update -qq >"$cache/apt.log" 2>&1 || note "apt-get update failed, see $cache/apt.log"
    apt-get install -y --no-install-recommends "${missing[@]}" >>"$cache/apt.log" 2>&1 ||
        die "apt-get install ${missing[*]} failed, see $cache/apt.log"
}

static_busybox() {
    local found
    found=$(command -v busybox) || return 1
    "$found" --list | grep -x cpio >/dev/null || return 1
    ! ldd "$found" >/dev/null 2>&1 || return 1
    echo "$found"
}

# The ELF kernel inside a bzImage: emulated, unpacking it costs the guest seconds.
elf_kernel() {   # BZIMAGE ROOT, whose python3 unpacks it
    chroot "$2" /usr/bin/python3 -c '
import lzma, struct, sys
image = sys.stdin.buffer.read()
offset, length = struct.unpack_from("<II", image, 0x248)
start = (image[0x1f1] + 1) * 512 + offset
elf = lzma.LZMADecompressor().decompress(image[start:start + length])
assert elf[:4] == b"\x7fELF"
sys.stdout.buffer.write(elf)' <"$1"
}

unpack_kernel() {   # TMP -> prints the release; TMP/kernel.deb's files in TMP/kernel
    local tmp=$1 package deb
    apt-get update -qq >>"$cache/apt.log" 2>&1 || note "apt-get update failed, see $cache/apt.log"
    package=$(apt-cache depends linux-image-amd64 2>/dev/null |
        awk '/Depends: linux-image-6\.1\./{print $2; exit}')
    [ -n "$package" ] || die "apt knows no linux-image-amd64 of Debian 12 (6.1)"
    note "downloading $package"
    mkdir "$tmp/deb" "$tmp/kernel"
    (cd "$tmp/deb" && apt-get download "$package" >>"$cache/apt.log" 2>&1) ||
        die "apt-get download $package failed, see $cache/apt.log"
    deb=$(echo "$tmp"/deb/linux-image-*.deb)
    dpkg -x "$deb" "$tmp/kernel" || die "cannot unpack $deb"
    echo "${package#linux-image-}"
}

copy_modules() {   # TMP RELEASE: each module after what it needs
    local tmp=$1 release=$2 dep module path name list=
    "$busybox" depmod -b "$tmp/kernel" "$release" || die "depmod failed"
    dep=$tmp/kernel/lib/modules/$release/modules.dep
    for module in $modules; do
        path=$(awk -F': *' -v m="/${module//_/[-_]}.ko" '$1 ~ m"$" {print $1, $2; exit}' "$dep")
        if [ -z "$path" ]; then
            [ "$module" = crc32_pclmul ] || note "module $module is not in the kernel (built in?)"
            continue
        fi
        # modules.dep names the nearest need first: load from the end
        for path in $(echo "$path" | tr ' ' '\n' | tac); do
            name=$(basename "$path" .ko)
            case " $list " in *" $name "*) continue ;; esac
            list="$list $name"
            cp "$tmp/kernel/lib/modules/$release/$path" "$tmp/init/modules/$name.ko"
        done
    done
    echo "$list" >"$tmp/init/modules.list"
}

build_image() {
    local tmp=$cache/build.$$ release mib
    rm -rf --one-file-system "$cache"/build.*
    mkdir -p "$tmp"/init/{bin,proc,sys,dev,over,ro,new,modules} "$tmp/done"
    trap "rm -rf --one-file-system '$tmp'" EXIT
    release=$(unpack_kernel "$tmp")
    note "making the guest's root (a few minutes)"
    debootstrap --variant=minbase --include="$packages" bookworm "$tmp/root" \
        ${MIRROR:+"$MIRROR"} >"$cache/debootstrap.log" 2>&1 ||
        die "debootstrap failed, see $cache/debootstrap.log"
    rm -rf "$tmp"/root/var/cache/apt/* "$tmp"/root/var/lib/apt/lists/* \
        "$tmp"/root/usr/share/{doc,man,locale,info}/*
    echo rdma-guest >"$tmp/root/etc/hostname"
    echo "127.0.0.1 localhost rdma-guest" >"$tmp/root/etc/hosts"
    mkdir -p "$tmp/root/share" "$tmp/root/site"

    copy_modules "$tmp" "$release"
    cp "$busybox" "$tmp/init/bin/busybox"
    cp "$here/guest/init" "$here/guest/net.sh" "$tmp/init/"
    chmod 755 "$tmp/init/init"
    (cd "$tmp/init" && find . | "$busybox" cpio -o -H newc 2>/dev/null) >"$tmp/done/initrd" ||
        die "cpio failed"
    mib=$(($(du -sm --apparent-size "$tmp/root" | cut -f1) * 5 / 4 + 64))
    mke2fs -q -t ext4 -O '^has_journal,^metadata_csum' -m 0 -d "$tmp/root" \
        "$tmp/done/root.img" "${mib}M" || die "mke2fs failed"
    elf_kernel "$tmp/kernel/boot/vmlinuz-$release" "$tmp/root" >"$tmp/done/kernel" 2>>"$cache/apt.log" ||
        cp "$tmp/kernel/boot/vmlinuz-$release" "$tmp/done/kernel"
    rm -rf "$image"
    mv "$tmp/done" "$image"
    rm -rf --one-file-system "$tmp"
    trap - EXIT
    note "image ready: $image"
}

# The guest's Python is Debian 12's 3.11, whatever the host has.
build_site() {
    note "fetching the guest's Python packages"
    rm -rf "$site.part"
    "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-compile \
        --target "$site.part" --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform any \
        --only-binary=:all: --constraint "$root/constraints.txt" $python_packages >&2 ||
        die "pip could not fetch the guest's Python packages"
    mv "$site.part" "$site"
}

# what is built from is in the name: a change builds anew
stamp=$({ echo "$packages $modules"; cat "$here"/guest/*
    declare -f build_image unpack_kernel copy_modules elf_kernel; } | sha256sum | cut -c1-16)
image=$cache/image-$stamp
stamp=$({ echo "$python_packages"; cat "$root/constraints.txt"; } | sha256sum | cut -c1-16)
site=$cache/site-$stamp

exec 9>"$cache/lock"
flock 9
install_tools
busybox=$(static_busybox) || die "busybox-static left no busybox"
[ -f "$image/root.img" ] || build_image
[ -d "$site" ] || build_site
ln -sfn "$site" "$image/site"
echo "$image"
