{{- define "deepseek-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/*
The name of all objects, which a Service and a label can carry whatever the release is called: small
letters, digits and dashes, a letter first and no dash last; 52 characters, so that suffixes stay
within 63.
*/}}
{{- define "deepseek-operator.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $part := include "deepseek-operator.name" . -}}
{{- $name = contains $part .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $part) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- $name = printf "r%s" $name -}}
{{- end -}}
{{- $name | replace "." "-" | trunc 52 | trimAll "-" -}}
{{- end -}}

{{/*
Objects of the cluster carry the namespace, so that two releases can have the same name. Neither
part may hold a dot, so no two pairs give one name.
*/}}
{{- define "deepseek-operator.clusterName" -}}
{{ .Release.Namespace }}.{{ include "deepseek-operator.fullname" . }}
{{- end -}}

{{- define "deepseek-operator.serviceAccount" -}}
{{- $made := .Values.serviceAccount.create | ternary (include "deepseek-operator.fullname" .) "default" -}}
{{- default $made .Values.serviceAccount.name -}}
{{- end -}}

{{- define "deepseek-operator.selector" -}}
app.kubernetes.io/name: {{ include "deepseek-operator.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "deepseek-operator.labels" -}}
{{ include "deepseek-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/*
Labels that a value adds to the chart's own: of other keys, since a key may stand in a map once.
Takes the value's path, the value, the template of the chart's own, and the root.
*/}}
{{- define "deepseek-operator.otherLabels" -}}
{{- $path := index . 0 -}}
{{- $labels := index . 1 -}}
{{- $own := include (index . 2) (index . 3) | fromYaml -}}
{{- range $key := keys $labels | sortAlpha -}}
{{- if hasKey $own $key -}}
{{- fail (printf "%s has %s=%s, but the chart sets that label itself, to %s; %s may have any labels but %s: leave those out" $path $key (get $labels $key) (get $own $key) $path (keys $own | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- toYaml $labels -}}
{{- end -}}

{{/* An image by digest, by tag, or by the chart's appVersion. Takes the image and the root. */}}
{{- define "deepseek-operator.image" -}}
{{- $image := index . 0 -}}
{{- $root := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}
