{{- define "infinistore.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "infinistore.selector" -}}
app.kubernetes.io/name: infinistore
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "infinistore.labels" -}}
{{ include "infinistore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The memory limit in MiB: a memfd counts in its pod. */}}
{{- define "infinistore.memoryLimitMiB" -}}
{{- $pool := mul .Values.pool.sizeGiB 1024 }}
{{- $beside := div (add $pool 19) 20 }}
{{- $least := ternary $beside (add $pool $beside) .Values.pool.hugePages.enabled }}
{{- $limit := default (add $least 512) .Values.resources.memoryLimitMiB }}
{{- if lt (int64 $limit) (int64 $least) }}
{{- fail (printf "resources.memoryLimitMiB is %d, but the pool counts in the pod: at least %d for pool.sizeGiB %d" (int64 $limit) $least (int64 .Values.pool.sizeGiB)) }}
{{- end }}
{{- $limit }}
{{- end }}

{{/* The settings of a server, as its configuration file. */}}
{{- define "infinistore.settings" -}}
{{- if and (not .Values.token.secret) (not .Values.tenants.secret) (not .Values.insecure) }}
{{- fail "other pods could read and write everything: set token.secret to the name of a secret with the token, tenants.secret, or insecure: true" }}
{{- end }}
{{- if and .Values.token.secret .Values.tenants.secret }}
{{- fail "set token.secret or tenants.secret: with tenants, each has tokens of its own" }}
{{- end }}
{{- if and .Values.tenants.peerToken.secret (not (and .Values.tenants.secret .Values.cluster)) }}
{{- fail "tenants.peerToken.secret goes with tenants.secret and cluster; nodes without tenants ask each other with token.secret" }}
{{- end }}
{{- if and .Values.tenants.secret (regexMatch "^infinistores?[+]etcd:" .Values.cluster) (not .Values.tenants.peerToken.secret) (not .Values.tls.secret) }}
{{- fail "tenants in a cluster need tenants.peerToken.secret, the name of a secret with the token of a tenant (infinistore tenant add nodes --role monitor), with which nodes ask each other who they are; or tls.secret, if a tenant has that certificate" }}
{{- end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secret) }}
{{- fail "tls.clientCertificates needs tls.secret, the name of a secret with tls.crt, tls.key and ca.crt" }}
{{- end }}
{{- $settings := dict
  "host" "0.0.0.0"
  "service_port" .Values.port
  "manage_host" "0.0.0.0"
  "manage_port" .Values.managePort
  "prealloc_size" (printf "%dGiB" (int64 .Values.pool.sizeGiB))
  "shards" .Values.shards
  "drain_timeout" .Values.drainTimeoutSeconds
  "unix_socket" "off"
}}
{{- if eq .Values.mode "node" }}{{ $_ := set $settings "unix_socket" "/run/infinistore/infinistore.sock" }}{{ $_ := set $settings "unix_socket_access" "group" }}{{ end }}
{{- if .Values.pool.hugePages.enabled }}{{ $_ := set $settings "huge_pages" true }}{{ end }}
{{- if .Values.token.secret }}{{ $_ := set $settings "token_file" (printf "/etc/infinistore-token/%s" .Values.token.key) }}{{ end }}
{{- if .Values.tenants.secret }}{{ $_ := set $settings "tenants" (printf "/etc/infinistore-tenants/%s" .Values.tenants.key) }}{{ end }}
{{- with .Values.tenants.peerToken }}{{ if .secret }}{{ $_ := set $settings "peer_token_file" (printf "/etc/infinistore-peer-token/%s" .key) }}{{ end }}{{ end }}
{{- with .Values.tls }}
{{- if .secret }}
{{- $_ := set $settings "tls_cert" "/etc/infinistore-tls/tls.crt" }}
{{- $_ := set $settings "tls_key" "/etc/infinistore-tls/tls.key" }}
{{- if .clientCertificates }}{{ $_ := set $settings "tls_client_ca" "/etc/infinistore-tls/ca.crt" }}{{ end }}
{{- if and $.Values.cluster .privateAuthority }}{{ $_ := set $settings "tls_peer_ca" "/etc/infinistore-tls/ca.crt" }}{{ end }}
{{- end }}
{{- end }}
{{- if .Values.insecure }}{{ $_ := set $settings "insecure" true }}{{ end }}
{{- if .Values.disk.enabled }}{{ $_ := set $settings "disk" (printf "/var/lib/infinistore/disk:%dGiB" (int64 .Values.disk.sizeGiB)) }}{{ end }}
{{- if .Values.rdma.required }}{{ $_ := set $settings "require_rdma" true }}{{ end }}
{{- if .Values.rdma.device }}{{ $_ := set $settings "dev_name" .Values.rdma.device }}{{ end }}
{{- if .Values.cluster }}{{ $_ := set $settings "cluster" .Values.cluster }}{{ end }}
{{- toYaml (merge (deepCopy .Values.settings) $settings) }}
{{- end }}

{{- define "infinistore.pod" -}}
metadata:
  labels:
    {{- include "infinistore.labels" . | nindent 4 }}
  {{- with .Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # Else a Service called infinistore sets INFINISTORE_SERVICE_PORT, which is a setting, too.
  enableServiceLinks: false
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add .Values.drainTimeoutSeconds 30 }}
  {{- if and .Values.rdma.enabled .Values.rdma.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: {{ .Values.socket.group }}
    fsGroup: {{ .Values.socket.group }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- $node := eq .Values.mode "node" }}
  {{- $scheme := ternary ", scheme: HTTPS" "" (ne .Values.tls.secret "") }}
  {{- $private := gt (int .Values.shards) 1 }}
  {{- if or $node $private }}
  initContainers:
    # Kubernetes makes folders for root, or for everybody: a server puts no socket there.
    - name: folders
      image: {{ include "infinistore.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [install]
      args: [-d, -o, "10001", -g, {{ .Values.socket.group | quote }}, -m, "0750"{{ if $node }}, /run/infinistore{{ if .Values.disk.enabled }}, /var/lib/infinistore{{ end }}{{ end }}{{ if $private }}, /tmp{{ end }}]
      securityContext:
        runAsNonRoot: false
        runAsUser: 0
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [CHOWN, FOWNER, DAC_OVERRIDE]}
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {memory: 64Mi}
      volumeMounts:
        {{- if $node }}
        - {name: sockets, mountPath: /run/infinistore}
        {{- if .Values.disk.enabled }}
        - {name: disk, mountPath: /var/lib/infinistore}
        {{- end }}
        {{- end }}
        {{- if $private }}
        - {name: temporary, mountPath: /tmp}
        {{- end }}
  {{- end }}
  containers:
    - name: infinistore
      image: {{ include "infinistore.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, --config, /etc/infinistore/infinistore.yaml]
      {{- if .Values.cluster }}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: INFINISTORE_NODE_ID, value: $(POD_NAME)}
        {{- if eq .Values.mode "pool" }}
        - {name: INFINISTORE_ADVERTISE, value: "$(POD_NAME).{{ include "infinistore.name" . }}.{{ .Release.Namespace }}:{{ .Values.port }}"}
        {{- else }}
        - {name: INFINISTORE_ADVERTISE, value: "$(POD_IP):{{ .Values.port }}"}
        {{- end }}
      {{- end }}
      ports:
        - {name: store, containerPort: {{ .Values.port }}}
        - {name: management, containerPort: {{ .Values.managePort }}}
      # It answers while the pool is allocated, which may take minutes.
      livenessProbe:
        httpGet: {path: /healthz, port: management{{ $scheme }}}
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: management{{ $scheme }}}
        timeoutSeconds: 5
      startupProbe:
        httpGet: {path: /healthz, port: management{{ $scheme }}}
        periodSeconds: 2
        failureThreshold: 60
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- if .Values.rdma.enabled }}
          add: [IPC_LOCK]
          {{- end }}
      resources:
        requests:
          cpu: {{ .Values.resources.cpu | quote }}
          memory: {{ include "infinistore.memoryLimitMiB" . }}Mi
        limits:
          memory: {{ include "infinistore.memoryLimitMiB" . }}Mi
          {{- if .Values.pool.hugePages.enabled }}
          hugepages-{{ .Values.pool.hugePages.size }}: {{ .Values.pool.sizeGiB }}Gi
          {{- end }}
          {{- if .Values.rdma.enabled }}
          {{ .Values.rdma.resource }}: {{ .Values.rdma.count }}
          {{- end }}
      volumeMounts:
        - {name: settings, mountPath: /etc/infinistore, readOnly: true}
        {{- if $node }}
        - {name: sockets, mountPath: /run/infinistore}
        {{- end }}
        - {name: temporary, mountPath: /tmp}
        {{- if .Values.token.secret }}
        - {name: token, mountPath: /etc/infinistore-token, readOnly: true}
        {{- end }}
        {{- if .Values.tls.secret }}
        - {name: tls, mountPath: /etc/infinistore-tls, readOnly: true}
        {{- end }}
        {{- if .Values.tenants.secret }}
        - {name: tenants, mountPath: /etc/infinistore-tenants, readOnly: true}
        {{- end }}
        {{- if .Values.tenants.peerToken.secret }}
        - {name: peer-token, mountPath: /etc/infinistore-peer-token, readOnly: true}
        {{- end }}
        {{- if .Values.disk.enabled }}
        - {name: disk, mountPath: /var/lib/infinistore}
        {{- end }}
  volumes:
    - name: settings
      configMap: {name: {{ include "infinistore.name" . }}}
    - name: temporary
      emptyDir: {sizeLimit: 16Mi}
    {{- if $node }}
    - name: sockets
      hostPath: {path: {{ .Values.socket.hostFolder }}, type: DirectoryOrCreate}
    {{- end }}
    {{- if .Values.token.secret }}
    - name: token
      secret:
        secretName: {{ .Values.token.secret }}
        defaultMode: 0440
    {{- end }}
    {{- range $name, $secret := dict "tls" .Values.tls.secret "tenants" .Values.tenants.secret "peer-token" .Values.tenants.peerToken.secret }}
    {{- if $secret }}
    - name: {{ $name }}
      secret:
        secretName: {{ $secret }}
        defaultMode: 0440
    {{- end }}
    {{- end }}
    {{- if and .Values.disk.enabled $node }}
    - name: disk
      hostPath: {path: {{ .Values.disk.hostFolder }}, type: DirectoryOrCreate}
    {{- end }}
{{- end }}

{{- define "infinistore.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
{{- end }}
