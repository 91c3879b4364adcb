//go:build tools

// Package tools names the command that this module exists to build.
package tools

import _ "github.com/coredns/coredns"
