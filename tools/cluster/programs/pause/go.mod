module deepseek.dev/tools/cluster/programs/pause

go 1.26.0
