{{- define "vcuda.labels" -}}
app.kubernetes.io/part-of: vcuda-gpu-manager
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "vcuda.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "vcuda.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "vcuda.extenderHost" -}}
{{ .Values.scheduler.extenderHost | default .Values.extender.service.clusterIP | default (printf "gpu-scheduler-extender.%s.svc" .Release.Namespace) }}
{{- end }}

{{- define "vcuda.scheme" -}}
{{ ternary "http" "https" (eq .Values.extender.tls.mode "none") }}
{{- end }}
