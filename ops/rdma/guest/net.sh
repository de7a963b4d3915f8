# Two Soft-RoCE devices on two dummy links: rxe0 on rnic0, rxe1 on rnic1.
set -e
ulimit -l unlimited
ip link set lo up
for i in 0 1; do
    ip link add rnic$i type dummy
    # 4,096 bytes of payload and the headers around them
    ip link set rnic$i mtu 4200 address 02:00:0a:4d:0$i:01
    echo 1 >/proc/sys/net/ipv6/conf/rnic$i/disable_ipv6
    ip addr add 10.77.$i.1/24 dev rnic$i
    ip link set rnic$i up
    rdma link add rxe$i type rxe netdev rnic$i
done
for i in 0 1; do
    tries=0
    until grep -q ACTIVE /sys/class/infiniband/rxe$i/ports/1/state; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || { echo "rxe$i is not ACTIVE"; exit 1; }
        sleep 0.05
    done
done
