{{/* The DaemonSet of the nodes of a zone, or of all nodes. */}}
{{- define "freestone-csi.node" -}}
{{- $root := .root }}
{{- $zone := .zone }}
{{- $node := $root.Values.node }}
{{- $sidecars := $root.Values.sidecars }}
{{- $isUblk := eq $node.backend "ublk" }}
{{- $usesDaemon := or $isUblk $node.kata }}
{{- $kataDir := "/run/kata-containers/shared/direct-volumes" }}
{{- $module := ternary "ublk_drv" "nvme-tcp" $isUblk }}
{{- $plugin := printf "%s/plugins/%s" $node.kubeletDir $root.Values.driverName }}
{{- $component := ternary (printf "node-%s" $zone.zone) "node" (not (empty $zone)) }}
{{- $common := list "--csi-address=/csi/csi.sock" (printf "--v=%d" (int $sidecars.logVerbosity)) -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ include "freestone-csi.fullname" $root }}-{{ $component }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "freestone-csi.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $component }}
spec:
  selector:
    matchLabels:
      {{- include "freestone-csi.selectorLabels" $root | nindent 6 }}
      app.kubernetes.io/component: {{ $component }}
  updateStrategy:
    {{- toYaml $node.updateStrategy | nindent 4 }}
  template:
    metadata:
      labels:
        {{- include "freestone-csi.labels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $component }}
        {{- with $node.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $node.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ include "freestone-csi.nodeAccount" $root }}
      automountServiceAccountToken: false
      priorityClassName: {{ $node.priorityClassName | quote }}
      # A connection of NVMe/TCP stays in the network of the process that made it, and must outlive the pod.
      hostNetwork: true
      dnsPolicy: ClusterFirstWithHostNet
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with merge (dict) ($zone.nodeSelector | default dict) $node.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $node.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $node.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $node.loadModules }}
      initContainers:
        - name: load-modules
          image: {{ include "freestone-csi.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [modprobe, -a, {{ $module }}]
          securityContext:
            runAsUser: 0
            readOnlyRootFilesystem: true
            capabilities: { drop: [ALL], add: [SYS_MODULE] }
          volumeMounts:
            - { name: modules, mountPath: /lib/modules, readOnly: true }
      {{- end }}
      containers:
        - name: driver
          image: {{ include "freestone-csi.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            - --mode=node
            - --endpoint=unix:///csi/csi.sock
            - --driver-name={{ $root.Values.driverName }}
            - --node-id=$(NODE_NAME)
            - --node-backend={{ $node.backend }}
            {{- with $node.hostNqn }}
            - --host-nqn={{ . }}
            {{- end }}
            - --state-dir={{ $node.stateDir }}
            - --max-volumes={{ int $node.maxVolumes }}
            {{- with $zone.zone }}
            - --zone={{ . }}
            {{- end }}
            {{- if $usesDaemon }}
            - --socket={{ $node.runtimeDir }}/freestoned.sock
            {{- end }}
            {{- if $node.kata }}
            - --kata-dir={{ $kataDir }}
            {{- end }}
            - --log={{ $root.Values.logLevel }}
          env:
            - { name: NODE_NAME, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
          securityContext:
            # Mounts that the node sees (Bidirectional) take privileges.
            privileged: true
            readOnlyRootFilesystem: true
            runAsUser: 0
          {{- include "freestone-csi.liveness" $node.livenessPort | nindent 10 }}
          {{- with $node.resources }}
          resources:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          volumeMounts:
            - { name: socket, mountPath: /csi }
            - { name: kubelet, mountPath: {{ $node.kubeletDir }}, mountPropagation: Bidirectional }
            - { name: dev, mountPath: /dev }
            - { name: sys, mountPath: /sys }
            - { name: state, mountPath: {{ $node.stateDir }} }
            {{- if not $node.hostNqn }}
            - { name: nvme, mountPath: /etc/nvme, readOnly: true }
            {{- end }}
            {{- if $node.kata }}
            - { name: kata, mountPath: {{ $kataDir }} }
            {{- end }}
            {{- if $usesDaemon }}
            # The directory, not the socket: a restarted daemon makes another one.
            - { name: runtime, mountPath: {{ $node.runtimeDir }} }
            {{- end }}
        {{- $registrar := append $common (printf "--kubelet-registration-path=%s/csi.sock" $plugin) }}
        {{- $mounts := list (dict "name" "registration" "mountPath" "/registration") }}
        {{- include "freestone-csi.sidecar" (dict "name" "registrar" "values" $sidecars.registrar "args" $registrar "mounts" $mounts) | nindent 8 }}
        {{- $probe := append $common (printf "--health-port=%d" (int $node.livenessPort)) }}
        {{- include "freestone-csi.sidecar" (dict "name" "liveness-probe" "values" $sidecars.livenessProbe "args" $probe) | nindent 8 }}
      volumes:
        - { name: socket, hostPath: { path: {{ $plugin }}, type: DirectoryOrCreate } }
        - { name: registration, hostPath: { path: {{ $node.kubeletDir }}/plugins_registry, type: Directory } }
        - { name: kubelet, hostPath: { path: {{ $node.kubeletDir }}, type: Directory } }
        - { name: dev, hostPath: { path: /dev, type: Directory } }
        - { name: sys, hostPath: { path: /sys, type: Directory } }
        - { name: state, hostPath: { path: {{ $node.stateDir }}, type: DirectoryOrCreate } }
        {{- if not $node.hostNqn }}
        - { name: nvme, hostPath: { path: /etc/nvme, type: Directory } }
        {{- end }}
        {{- if $node.kata }}
        - { name: kata, hostPath: { path: {{ $kataDir }}, type: DirectoryOrCreate } }
        {{- end }}
        {{- if $usesDaemon }}
        - { name: runtime, hostPath: { path: {{ $node.runtimeDir }}, type: Directory } }
        {{- end }}
        {{- if $node.loadModules }}
        - { name: modules, hostPath: { path: /lib/modules, type: Directory } }
        {{- end }}
{{- end -}}
