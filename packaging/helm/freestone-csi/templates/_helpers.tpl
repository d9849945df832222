{{/* Names: RELEASE-freestone-csi, or RELEASE where it says so itself. */}}
{{- define "freestone-csi.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "freestone-csi.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "freestone-csi.labels" -}}
{{ include "freestone-csi.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{- define "freestone-csi.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end -}}

{{- define "freestone-csi.secretName" -}}
{{ .Values.existingSecret | default (printf "%s-backends" (include "freestone-csi.fullname" .)) }}
{{- end -}}

{{- define "freestone-csi.controllerAccount" -}}
{{ .Values.serviceAccount.controller | default (printf "%s-controller" (include "freestone-csi.fullname" .)) }}
{{- end -}}

{{- define "freestone-csi.nodeAccount" -}}
{{ .Values.serviceAccount.node | default (printf "%s-node" (include "freestone-csi.fullname" .)) }}
{{- end -}}

{{/* The file of --backends. A string of JSON is one of TOML. */}}
{{- define "freestone-csi.backends" -}}
{{- range $backend := .Values.backends }}
[[backend]]
name = {{ toJson $backend.name }}
url = {{ toJson $backend.url }}
{{- if $backend.token }}
token-file = {{ toJson (printf "/etc/freestone-csi/token-%s" $backend.name) }}
{{- end }}
{{- if $backend.ca }}
ca-file = {{ toJson (printf "/etc/freestone-csi/ca-%s" $backend.name) }}
{{- end }}
{{- range $key := list "backing" "listen" "portal" "reservations" "zone" }}
{{- with get $backend $key }}
{{ $key }} = {{ toJson . }}
{{- end }}
{{- end }}
{{- with $backend.addresses }}
addresses = {{ toJson . }}
{{- end }}
{{ end -}}
{{- end -}}

{{/* What a container without privileges may do. */}}
{{- define "freestone-csi.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* A sidecar, which sees the socket of the driver: name, values (of .Values.sidecars), args, and mounts and env beyond these. */}}
{{- define "freestone-csi.sidecar" -}}
- name: {{ .name }}
  image: {{ .values.image | quote }}
  imagePullPolicy: IfNotPresent
  args:
    {{- range .args }}
    - {{ . | quote }}
    {{- end }}
  {{- with .env }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "freestone-csi.confined" . | nindent 4 }}
  {{- with .values.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - { name: socket, mountPath: /csi }
    {{- with .mounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The port of the sidecar liveness-probe: kubelet restarts a driver that does not answer. */}}
{{- define "freestone-csi.liveness" -}}
ports:
  - { name: healthz, containerPort: {{ . }}, protocol: TCP }
livenessProbe:
  httpGet: { path: /healthz, port: healthz }
  initialDelaySeconds: 10
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 5
{{- end -}}
