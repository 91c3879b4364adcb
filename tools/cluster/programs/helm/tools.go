//go:build tools

// Package tools names the command that this module exists to build.
package tools

import _ "helm.sh/helm/v4/cmd/helm"
