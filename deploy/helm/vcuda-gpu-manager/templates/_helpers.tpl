{{- define "vcuda.partOf" -}}
{{ .Values.nameOverride | default .Chart.Name }}
{{- end }}

{{- /* The name of an object in the release's namespace: that of the program, which `kubectl exec ds/gpu-manager` and the docs use. */ -}}
{{- define "vcuda.named" -}}
{{ with .root.Values.fullnameOverride }}{{ . }}-{{ end }}{{ .name }}
{{- end }}

{{- /* In front of the name of an object of the whole cluster. */ -}}
{{- define "vcuda.clusterPrefix" -}}
{{ .Values.fullnameOverride | default .Release.Name }}
{{- end }}

{{- define "vcuda.managerAccount" -}}
{{ .Values.manager.serviceAccount.name | default (include "vcuda.named" (dict "root" . "name" "gpu-manager")) }}
{{- end }}

{{- define "vcuda.extenderAccount" -}}
{{ .Values.extender.serviceAccount.name | default (include "vcuda.named" (dict "root" . "name" "gpu-scheduler-extender")) }}
{{- end }}

{{- define "vcuda.labels" -}}
app.kubernetes.io/part-of: {{ include "vcuda.partOf" . }}
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
{{ .Values.scheduler.extenderHost | default .Values.extender.service.clusterIP | default (printf "%s.%s.svc" (include "vcuda.named" (dict "root" . "name" "gpu-scheduler-extender")) .Release.Namespace) }}
{{- end }}

{{- define "vcuda.scheme" -}}
{{ ternary "http" "https" (eq .Values.extender.tls.mode "none") }}
{{- end }}

{{- define "vcuda.quotas" -}}
{{- $quotas := .Values.extender.quotas -}}
{{- if and $quotas.entries $quotas.configMap }}{{ fail "extender.quotas: give entries or the name of a configMap, not both" }}{{ end -}}
{{- $quotas.configMap | default (ternary (include "vcuda.named" (dict "root" . "name" "gpu-quotas")) "" (gt (len $quotas.entries) 0)) -}}
{{- end }}

{{- /* Nothing, or the end of the rendering: what the program would refuse when it starts is refused here. */ -}}
{{- define "vcuda.known" -}}
{{- $known := index (fromJson (.root.Files.Get "settings.json")) .value -}}
{{- range .flags }}
{{- $name := first (splitList "=" (trimPrefix "--" .)) -}}
{{- if not (and (hasPrefix "--" .) (has $name $known)) }}{{ fail (printf "%s: %q is no flag of the program, written --name=value; --help and docs/names.md list them" $.value .) }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "vcuda.managerConfig" -}}
{{- $manager := .Values.manager -}}
{{- $labels := list -}}
{{- range $name, $value := $manager.nodeLabels }}{{ $labels = append $labels (printf "%s=%s" $name $value) }}{{ end -}}
{{- $file := dict
  "audit-policy" $manager.audit.policy
  "audit-tolerance" (int $manager.audit.toleranceMiB)
  "drift-tolerance" (int $manager.driftTolerance)
  "dead-card-policy" $manager.deadCardPolicy
  "device-cgroup-policy" $manager.deviceCgroupPolicy
  "driver-limits" $manager.driverLimits
  "require-driver-limits" $manager.requireDriverLimits
  "injection" $manager.injection
  "failed-admission-grace" (int $manager.failedAdmissionGrace)
  "node-labels" (join "," $labels)
  "log-format" $manager.logFormat
  "v" (int $manager.verbosity) -}}
{{- $arguments := list "resource-domain" "driver-root" "driver-root-on-host" "checkpoint-path" "virtual-manager-path" "usage-storage"
  "device-plugin-path" "pod-resources-socket" "kubelet-url" "kubelet-ca-file" "kubelet-verify" "query-addr" "query-port" "query-auth" "cgroup-root" "config" -}}
{{- range $name, $value := $manager.config }}
{{- if or (hasKey $file $name) (has $name $arguments) }}{{ fail (printf "manager.config.%s: the chart has a value of its own for this setting" $name) }}{{ end -}}
{{- if not (has $name (index (fromJson ($.Files.Get "settings.json")) "manager.config")) }}{{ fail (printf "manager.config.%s: gpu-manager has no such setting; docs/manager.md lists them" $name) }}{{ end -}}
{{- $_ := set $file $name $value }}
{{- end -}}
{{- toYaml $file }}
{{- end }}

{{- define "vcuda.kubeletAccess" -}}
{{- $access := .Values.manager.kubelet.access -}}
{{- if eq $access "auto" }}{{ ternary "pods" "proxy" (semverCompare ">=1.33-0" .Capabilities.KubeVersion.Version) }}{{ else }}{{ $access }}{{ end -}}
{{- end }}
