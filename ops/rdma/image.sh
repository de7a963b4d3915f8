#!/usr/bin/env bash
# Build the virtual machine's kernel, root image and Python packages, once.
#
# usage: image.sh CACHE_DIR          prints the folder of the image
#
# Needs root, x86-64 and Debian's apt. Missing tools (qemu, e2fsprogs) are installed by
# apt-get; the guest's kernel and files are of the host's Debian release, unpacked and
# not installed. A lock makes several callers wait for one build; a changed script
# builds anew.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

die() { echo "ops/rdma: error: $*" >&2; exit 125; }
note() { echo "ops/rdma: $*" >&2; }

[ $# -eq 1 ] || die "usage: image.sh CACHE_DIR"
[ "$(uname -m)" = x86_64 ] || die "needs an x86-64 host, this is $(uname -m)"
[ "$(id -u)" = 0 ] || die "needs root (apt)"
mkdir -p "$1" || die "cannot make the cache folder $1"
cache=$(realpath "$1")

packages="python3 python3-pyverbs rdma-core ibverbs-providers ibverbs-utils perftest iproute2
    kmod procps bash coreutils dash grep sed findutils hostname busybox-static linux-image-amd64"
# what they depend on and only their installation needs
unwanted='linux-image-amd64|linux-base|perl.*|libperl.*|initramfs-.*|klibc-utils|libklibc|pci.ids|cpio|adduser|debconf|dpkg|udev|logsave|usrmerge|lib.*-perl'
modules="virtio_pci virtio_blk virtio_console virtio_rng crc32c_generic ext4 overlay 9p
    9pnet_virtio dummy veth crc32_generic crc32_pclmul ib_uverbs rdma_ucm rdma_rxe"
# what kvtide.transfer imports, and what its tests need; versions from constraints.txt
python_packages="xxhash msgspec psutil pydantic-settings structlog prometheus-client pytest pytest-timeout anyio hypothesis"

export DEBIAN_FRONTEND=noninteractive
update() {
    [ -z "${updated:-}" ] || return 0
    updated=1
    apt-get update -qq >>"$cache/apt.log" 2>&1 || note "apt-get update failed, see $cache/apt.log"
}

install_tools() {
    local missing=()
    command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
    command -v mke2fs >/dev/null || missing+=(e2fsprogs)
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || die "missing, and no apt-get: ${missing[*]}"
    note "installing ${missing[*]}"
    update
    apt-get install -y --no-install-recommends "${missing[@]}" >>"$cache/apt.log" 2>&1 ||
        die "apt-get install ${missing[*]} failed, see $cache/apt.log"
}

# The packages with all that they depend on, as if nothing were installed.
download() {   # TMP -> TMP/archives/*.deb
    mkdir -p "$1/archives/partial"
    : >"$1/status"
    update
    note "downloading the guest's packages"
    # shellcheck disable=SC2086 - a list
    apt-get -qq -y --download-only --no-install-recommends -o "Dir::State::status=$1/status" \
        -o "Dir::Cache::archives=$1/archives" -o APT::Sandbox::User=root \
        install $packages >>"$cache/apt.log" 2>&1 ||
        die "apt-get has not all of the guest's packages, see $cache/apt.log"
}

unpack() {   # TMP -> TMP/root, TMP/kernel
    local tmp=$1 deb name
    mkdir -p "$tmp/root" "$tmp/kernel"
    for deb in "$tmp"/archives/*.deb; do
        name=$(basename "$deb"); name=${name%%_*}
        if [[ $name =~ ^($unwanted)$ ]]; then
            continue
        elif [[ $name == linux-image-* ]]; then
            dpkg-deb -x "$deb" "$tmp/kernel"
        else
            dpkg-deb -x "$deb" "$tmp/root"
        fi || die "cannot unpack $deb"
    done
    rm -rf "$tmp/archives"
    # what installing would have made
    [ -e "$tmp/root/bin/sh" ] || ln -s dash "$tmp/root/bin/sh"
    echo 'root:x:0:0::/:/bin/bash' >"$tmp/root/etc/passwd"
    echo 'root:x:0:' >"$tmp/root/etc/group"
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
    download "$tmp"
    note "making the guest's root"
    unpack "$tmp"
    release=$(basename "$tmp"/kernel/lib/modules/*)
    rm -rf "$tmp"/root/usr/share/{doc,man,locale,info,lintian}/*
    busybox=$tmp/done/busybox
    cp "$tmp/root/bin/busybox" "$busybox"
    echo rdma-guest >"$tmp/root/etc/hostname"
    echo "127.0.0.1 localhost rdma-guest" >"$tmp/root/etc/hosts"
    mkdir -p "$tmp/root/share" "$tmp/root/site"

    # emulated, compiling the library anew in each run would cost seconds
    chroot "$tmp/root" /usr/bin/python3 -m compileall -q /usr/lib/python3* \
        -x '/(test|lib2to3|idlelib|distutils|turtledemo|pydoc_data)/' >>"$cache/apt.log" || true
    chroot "$tmp/root" /usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
        >"$tmp/done/python"
    copy_modules "$tmp" "$release"
    cp "$busybox" "$tmp/init/bin/busybox"
    cp "$here/guest/init" "$here/guest/net.sh" "$tmp/init/"
    chmod 755 "$tmp/init/init"
    (cd "$tmp/init" && find . | "$busybox" cpio -o -H newc 2>/dev/null) >"$tmp/done/initrd" ||
        die "cpio failed"
    mib=$(($(du -sm --apparent-size "$tmp/root" | cut -f1) * 5 / 4 + 64))
    mke2fs -q -t ext4 -O '^has_journal,^metadata_csum' -m 0 -d "$tmp/root" \
        "$tmp/done/root.img" "${mib}M" >>"$cache/apt.log" || die "mke2fs failed"
    elf_kernel "$tmp/kernel/boot/vmlinuz-$release" "$tmp/root" >"$tmp/done/kernel" 2>>"$cache/apt.log" ||
        cp "$tmp/kernel/boot/vmlinuz-$release" "$tmp/done/kernel"
    rm -rf "$image"
    mv "$tmp/done" "$image"
    rm -rf --one-file-system "$tmp"
    trap - EXIT
    note "image ready: $image"
}

# The guest's Python is its Debian's, whatever .venv has.
build_site() {
    local version python=$root/.venv/bin/python
    [ -x "$python" ] || python=python3
    version=$(cat "$image/python")
    note "fetching the guest's Python packages"
    rm -rf "$site.part"
    "$python" -m pip install --quiet --disable-pip-version-check \
        --target "$site.part" --python-version "$version" --implementation cp --abi "cp${version/./}" --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform any \
        --only-binary=:all: --constraint "$root/constraints.txt" $python_packages >&2 ||
        die "pip could not fetch the guest's Python packages"
    mv "$site.part" "$site"
}

# what is built from is in the name: a change builds anew
stamp=$({ echo "$packages $unwanted $modules"; cat "$here"/guest/*
    declare -f build_image download unpack copy_modules elf_kernel; } | sha256sum | cut -c1-16)
image=$cache/image-$stamp
stamp=$({ echo "$python_packages"; cat "$root/constraints.txt"; } | sha256sum | cut -c1-16)
site=$cache/site-$stamp

exec 9>"$cache/lock"
flock 9
install_tools
[ -f "$image/root.img" ] || build_image
[ -d "$site" ] || build_site
ln -sfn "$site" "$image/site"
# what nobody has used for a week is of scripts and versions that are gone
touch "$image" "$site"
find "$cache" -maxdepth 1 \( -name 'image-*' -o -name 'site-*' \) -mtime +7 \
    -exec rm -rf --one-file-system {} +
echo "$image"
