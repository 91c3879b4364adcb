//go:build tools

// Package tools names the command that this module exists to build.
package tools

import _ "go.etcd.io/etcd/server/v3"
