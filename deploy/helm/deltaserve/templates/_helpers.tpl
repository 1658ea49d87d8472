{{- define "deltaserve.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{- define "deltaserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "deltaserve.labels" -}}
{{ include "deltaserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "deltaserve.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "deltaserve.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "deltaserve.workersNamespace" -}}
{{ .Values.kubernetes.namespace | default .Release.Namespace }}
{{- end }}

{{- define "deltaserve.workersSelector" -}}
{{- if .Values.kubernetes.selector -}}
{{ .Values.kubernetes.selector }}
{{- else if .Values.workers -}}
app.kubernetes.io/name={{ .Chart.Name }},app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=worker
{{- else -}}
{{ fail "kubernetes.selector: expected the labels of the engines' pods, as in app=sglang, or workers" }}
{{- end -}}
{{- end }}

{{- define "deltaserve.routerToml" -}}
host = "0.0.0.0"
port = 8000
{{- if .Values.admin.secret }}
admin_token = "env:DELTASERVE_ADMIN_TOKEN"
{{- end }}
{{ .Values.config | trim }}

{{- if .Values.picker.enabled }}

[picker]
host = "0.0.0.0"
port = {{ .Values.picker.port | int }}
patience_s = {{ .Values.picker.patience_s }}
{{- end }}

[kubernetes]
selector = {{ include "deltaserve.workersSelector" . | quote }}
namespace = {{ include "deltaserve.workersNamespace" . | quote }}
port = {{ .Values.kubernetes.port | int }}
{{- if .Values.workerKey.secret }}
api_key = "env:DELTASERVE_WORKER_KEY"
{{- end }}

[kubernetes.worker]
{{- range $field, $value := .Values.kubernetes.worker }}
{{ $field }} = {{ toJson $value }}
{{- end }}
{{- end }}
