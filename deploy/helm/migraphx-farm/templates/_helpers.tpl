{{- define "farm.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "farm.labels" -}}
app.kubernetes.io/name: migraphx-farm
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "farm.selector" -}}
app.kubernetes.io/name: migraphx-farm
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "farm.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* What restarts pods: the settings that they read at their start. */}}
{{- define "farm.checksums" -}}
checksum/settings: {{ include (print $.Template.BasePath "/settings.yaml") . | sha256sum }}
checksum/secrets-version: {{ .Values.secretsVersion | sha256sum }}
{{- end }}

{{/* The port of object storage that network policies leave open. */}}
{{- define "farm.objectStoragePort" -}}
{{- $url := urlParse .Values.objectStorage.endpoint -}}
{{- $named := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- .Values.networkPolicy.objectStoragePort | default $named | default (ternary 80 443 (eq $url.scheme "http")) -}}
{{- end }}

{{/* Pod Security "restricted". Workers for GPUs also need the numbers of the groups that own /dev/kfd and /dev/dri. */}}
{{- define "farm.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "farm.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "farm.secretVariable" -}}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}

{{/* Seconds for which attempts may go on after SIGTERM. */}}
{{- define "farm.graceSeconds" -}}
{{- if eq .onTerminate "checkpoint" -}}{{ .sliceSeconds | int }}{{- else -}}{{ .finishSeconds | int }}{{- end -}}
{{- end }}

{{/* Longer than that: a worker then gives back what is not done (5 s), and programs that are finished are uploaded. */}}
{{- define "farm.terminationSeconds" -}}
{{- add (include "farm.graceSeconds" . | int) (.uploadSeconds | int) 30 -}}
{{- end }}

{{/* A pool with all defaults. */}}
{{- define "farm.pool" -}}
{{- $defaults := dict
  "kind" "ScaledJob" "device" "cpu" "slots" 1 "autoscale" false "idleSeconds" 120 "onTerminate" "finish"
  "finishSeconds" 14400 "sliceSeconds" 60 "uploadSeconds" 60 "pdb" false "dataSize" "20Gi" "storageClass" ""
  "workers" (dict "min" 0 "max" 10) "nodeSelector" (dict) "tolerations" (list) "settings" (dict)
  "groups" (list) "pools" (list)
  "resources" (dict "requests" (dict "cpu" "1" "memory" "4Gi") "limits" (dict "memory" "8Gi"))
  "image" (dict "repository" "migraphx-farm/worker")
  "gpu" (dict "by" "plugin" "resource" "amd.com/gpu" "deviceClass" "gpu.amd.com" "count" 1) -}}
{{- mergeOverwrite $defaults (deepCopy .) | toYaml -}}
{{- end }}

{{/* The pod of a worker: `root`, `name`, `pool` (with its defaults), `idle` (seconds, 0: it stays), `restart`. */}}
{{- define "farm.workerPod" -}}
{{- $pool := .pool }}
{{- $root := .root }}
metadata:
  labels:
    {{- include "farm.labels" $root | nindent 4 }}
    app.kubernetes.io/component: worker
    farm/pool: {{ .name }}
  annotations:
    {{- include "farm.checksums" $root | nindent 4 }}
    {{- if $pool.pdb }}
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    karpenter.sh/do-not-disrupt: "true"
    {{- end }}
spec:
  restartPolicy: {{ .restart }}
  automountServiceAccountToken: false
  serviceAccountName: {{ if $root.Values.serviceAccount.create }}{{ include "farm.name" $root }}-worker{{ else }}default{{ end }}
  terminationGracePeriodSeconds: {{ include "farm.terminationSeconds" $pool }}
  securityContext:
    {{- include "farm.podSecurity" $root | nindent 4 }}
    {{- with $pool.groups }}
    # Numbers, since names mean other numbers in the image. They own /dev/kfd and /dev/dri on the host.
    supplementalGroups: {{ toJson . }}
    {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "farm.image" (dict "root" $root "image" $pool.image) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - worker
        - --only
        - {{ $pool.device }}
        {{- if eq $pool.device "cpu" }}
        - --slots
        - {{ $pool.slots | quote }}
        {{- end }}
        {{- if .idle }}
        - --exit-when-idle
        - {{ .idle | quote }}
        {{- end }}
      envFrom:
        - configMapRef: {name: {{ include "farm.name" $root }}-settings}
      env:
        {{- include "farm.secretVariable" (dict "name" "FARM_REDIS_URL" "secret" $root.Values.redis.existingSecret "key" $root.Values.redis.workerKey) | nindent 8 }}
        {{- with $root.Values.objectStorage.existingSecret }}
        {{- include "farm.secretVariable" (dict "name" "FARM_S3_ACCESS_KEY" "secret" . "key" $root.Values.objectStorage.workerAccessKey) | nindent 8 }}
        {{- include "farm.secretVariable" (dict "name" "FARM_S3_SECRET_KEY" "secret" . "key" $root.Values.objectStorage.workerSecretKey) | nindent 8 }}
        {{- end }}
        - {name: FARM_GRACE_SECONDS, value: {{ include "farm.graceSeconds" $pool | quote }}}
        - {name: FARM_HEALTH_PORT, value: "8081"}
        {{- range $key, $value := $pool.settings }}
        - {name: {{ printf "FARM_%s" (upper $key) }}, value: {{ $value | quote }}}
        {{- end }}
      ports:
        - {name: health, containerPort: 8081, protocol: TCP}
      # Long enough for a survey of GPUs and compilers.
      startupProbe:
        httpGet: {path: /live, port: health}
        periodSeconds: 5
        failureThreshold: 60
      # Whether the process looks after its slots; Redis is not asked, for no restart would mend it.
      livenessProbe:
        httpGet: {path: /live, port: health}
        periodSeconds: 20
        timeoutSeconds: 5
        failureThreshold: 6
      # Whether it takes jobs.
      readinessProbe:
        httpGet: {path: /ready, port: health}
        periodSeconds: 10
        timeoutSeconds: 5
      securityContext:
        {{- include "farm.containerSecurity" $root | nindent 8 }}
      {{- $resources := deepCopy $pool.resources }}
      {{- if eq $pool.device "gpu" }}
      {{- if eq $pool.gpu.by "dra" }}
      {{- $_ := set $resources "claims" (list (dict "name" "gpu")) }}
      {{- else }}
      {{- $limits := merge (dict $pool.gpu.resource ($pool.gpu.count | toString)) (get $resources "limits" | default dict) }}
      {{- $_ := set $resources "limits" $limits }}
      {{- end }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: data, mountPath: /var/lib/farm}
        - {name: tmp, mountPath: /tmp}
  {{- if and (eq $pool.device "gpu") (eq $pool.gpu.by "dra") }}
  resourceClaims:
    - {name: gpu, resourceClaimTemplateName: {{ include "farm.name" $root }}-{{ .name }}-gpu}
  {{- end }}
  volumes:
    {{- if $pool.storageClass }}
    - name: data
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes: [ReadWriteOnce]
            storageClassName: {{ $pool.storageClass }}
            resources: {requests: {storage: {{ $pool.dataSize }}}}
    {{- else }}
    - {name: data, emptyDir: {sizeLimit: {{ $pool.dataSize }}}}
    {{- end }}
    - {name: tmp, emptyDir: {}}
  # One worker measures more exactly than two on a node.
  affinity:
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "farm.selector" (dict "root" $root "component" "worker") | nindent 16 }}
  {{- with $pool.nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
{{- end }}
