module deepseek.dev/tools/cluster/programs/gateway-api

go 1.26.0

require sigs.k8s.io/gateway-api v1.6.1
