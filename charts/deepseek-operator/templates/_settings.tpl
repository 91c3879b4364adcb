{{/* Generated from deepseek_operator/settings.py by tools/generate.py; do not edit. */}}
{{- define "deepseek-operator.environment" -}}
- name: DEEPSEEK_OPERATOR__NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: DEEPSEEK_OPERATOR__WATCH_NAMESPACES
  value: {{ join "," .Values.settings.watchNamespaces | quote }}
- name: DEEPSEEK_OPERATOR__IDENTITY
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: DEEPSEEK_OPERATOR__POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: DEEPSEEK_OPERATOR__PROMETHEUS_NAMESPACES
  value: {{ join "," .Values.settings.prometheusNamespaces | quote }}
- name: DEEPSEEK_OPERATOR__CLIENT_NAMESPACES
  value: {{ join "," .Values.settings.clientNamespaces | quote }}
- name: DEEPSEEK_OPERATOR__KEDA
  value: {{ .Values.settings.keda | quote }}
- name: DEEPSEEK_OPERATOR__GATEWAY_API
  value: {{ .Values.settings.gatewayApi | quote }}
- name: DEEPSEEK_OPERATOR__PROMETHEUS_URL
  value: {{ .Values.settings.prometheusUrl | quote }}
- name: DEEPSEEK_OPERATOR__WORKER_IMAGE
  value: {{ include "deepseek-operator.image" (list .Values.worker.image .) | quote }}
- name: DEEPSEEK_OPERATOR__IMAGE_PULL_POLICY
  value: {{ .Values.settings.imagePullPolicy | quote }}
- name: DEEPSEEK_OPERATOR__HUGGING_FACE_ENDPOINT
  value: {{ .Values.settings.huggingFaceEndpoint | quote }}
- name: DEEPSEEK_OPERATOR__VOLUME_GROUP
  value: {{ if kindIs "invalid" .Values.settings.volumeGroup }}""{{ else }}{{ int64 .Values.settings.volumeGroup | quote }}{{ end }}
- name: DEEPSEEK_OPERATOR__HTTP_PORT
  value: {{ int64 .Values.settings.httpPort | quote }}
- name: DEEPSEEK_OPERATOR__LOG_LEVEL
  value: {{ .Values.settings.logLevel | quote }}
- name: DEEPSEEK_OPERATOR__LOG_FORMAT
  value: {{ .Values.settings.logFormat | quote }}
- name: DEEPSEEK_OPERATOR__LEASE_NAME
  value: {{ .Values.settings.leaseName | quote }}
- name: DEEPSEEK_OPERATOR__LEASE_DURATION_SECONDS
  value: {{ int64 .Values.settings.leaseDurationSeconds | quote }}
- name: DEEPSEEK_OPERATOR__RESYNC_SECONDS
  value: {{ .Values.settings.resyncSeconds | quote }}
- name: DEEPSEEK_OPERATOR__MAX_CONCURRENT_RECONCILES
  value: {{ int64 .Values.settings.maxConcurrentReconciles | quote }}
- name: DEEPSEEK_OPERATOR__API_TIMEOUT_SECONDS
  value: {{ .Values.settings.apiTimeoutSeconds | quote }}
- name: DEEPSEEK_OPERATOR__API_RETRIES
  value: {{ int64 .Values.settings.apiRetries | quote }}
- name: DEEPSEEK_OPERATOR__PROBE_SECONDS
  value: {{ .Values.settings.probeSeconds | quote }}
- name: DEEPSEEK_OPERATOR__PROBE_TIMEOUT_SECONDS
  value: {{ .Values.settings.probeTimeoutSeconds | quote }}
- name: DEEPSEEK_OPERATOR__MAX_CONCURRENT_PROBES
  value: {{ int64 .Values.settings.maxConcurrentProbes | quote }}
- name: DEEPSEEK_OPERATOR__WORKER_STATE_URL
  value: {{ .Values.settings.workerStateUrl | quote }}
- name: DEEPSEEK_OPERATOR__WATCH_SECONDS
  value: {{ int64 .Values.settings.watchSeconds | quote }}
{{- end }}
