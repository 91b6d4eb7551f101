CREATE TABLE outbox_migration (
    version INTEGER NOT NULL, applied_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    PRIMARY KEY (version)
);
CREATE TABLE outbox_event (
    id UUID NOT NULL, event_id UUID NOT NULL, destination VARCHAR(100) COLLATE "C" NOT NULL,
    aggregate_type VARCHAR(100) COLLATE "C" NOT NULL, aggregate_id VARCHAR(255) COLLATE "C" NOT NULL,
    event_type VARCHAR(100) COLLATE "C" NOT NULL, payload JSONB, payload_data BYTEA,
    payload_encoding VARCHAR(50) COLLATE "C", headers JSONB NOT NULL, ordering_key VARCHAR(255) COLLATE "C",
    position BIGINT GENERATED ALWAYS AS IDENTITY (CACHE 1),
    status VARCHAR(20) COLLATE "C" DEFAULT 'pending' NOT NULL,
    idempotency_key VARCHAR(255) COLLATE "C" NOT NULL, attempts INTEGER DEFAULT 0 NOT NULL,
    max_attempts INTEGER DEFAULT 5 NOT NULL, crashes INTEGER DEFAULT 0 NOT NULL,
    next_attempt_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp(), leased_until TIMESTAMP WITH TIME ZONE,
    lease_token UUID, lease_owner VARCHAR(200) COLLATE "C",
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    last_attempt_at TIMESTAMP WITH TIME ZONE, delivered_at TIMESTAMP WITH TIME ZONE, error_message TEXT,
    PRIMARY KEY (id),
    CONSTRAINT outbox_event_status CHECK (status IN ('pending', 'delivered', 'failed', 'discarded')),
    CONSTRAINT outbox_event_lease CHECK ((leased_until IS NULL) = (lease_token IS NULL) AND (lease_token IS NULL) = (lease_owner IS NULL)),
    CONSTRAINT outbox_event_final CHECK (status = 'pending' OR (next_attempt_at IS NULL AND leased_until IS NULL)),
    CONSTRAINT outbox_event_parked CHECK (status <> 'pending' OR next_attempt_at IS NOT NULL OR ordering_key IS NOT NULL),
    CONSTRAINT outbox_event_delivered CHECK ((status = 'delivered') = (delivered_at IS NOT NULL)),
    CONSTRAINT outbox_event_payload CHECK ((payload IS NULL) <> (payload_data IS NULL) AND (payload_data IS NULL) = (payload_encoding IS NULL)),
    CONSTRAINT outbox_event_counts CHECK (attempts >= 0 AND max_attempts >= 1 AND crashes >= 0)
)
 WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, autovacuum_analyze_scale_factor = 0.02, autovacuum_analyze_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX idx_outbox_event_aggregate ON outbox_event (aggregate_type, aggregate_id);
CREATE INDEX idx_outbox_event_delivered ON outbox_event (destination, delivered_at) WHERE status = 'delivered';
CREATE INDEX idx_outbox_event_failed ON outbox_event (destination, position) WHERE status = 'failed';
CREATE INDEX idx_outbox_event_key_head ON outbox_event (destination, ordering_key, position) WHERE status IN ('pending', 'failed') AND ordering_key IS NOT NULL;
CREATE INDEX idx_outbox_event_pending_next_attempt ON outbox_event (destination, next_attempt_at, position) WHERE status = 'pending';
CREATE TABLE outbox_idempotency (
    event_type VARCHAR(100) COLLATE "C" NOT NULL, idempotency_key VARCHAR(255) COLLATE "C" NOT NULL,
    event_id UUID NOT NULL, created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    PRIMARY KEY (event_type, idempotency_key)
);
CREATE INDEX idx_outbox_idempotency_created ON outbox_idempotency (created_at);
CREATE TABLE outbox_attempt (
    delivery_id UUID NOT NULL, attempt INTEGER NOT NULL,
    failed_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    relay VARCHAR(200) COLLATE "C" NOT NULL, error_message TEXT NOT NULL, PRIMARY KEY (delivery_id, attempt)
);
CREATE TABLE outbox_destination (
    name VARCHAR(100) COLLATE "C" NOT NULL, paused_at TIMESTAMP WITH TIME ZONE,
    paused_until TIMESTAMP WITH TIME ZONE, paused_by VARCHAR(200) COLLATE "C", pause_reason TEXT,
    circuit VARCHAR(20) COLLATE "C" DEFAULT 'closed' NOT NULL, circuit_until TIMESTAMP WITH TIME ZONE,
    circuit_reason TEXT, rate_at TIMESTAMP WITH TIME ZONE,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL, PRIMARY KEY (name),
    CONSTRAINT outbox_destination_circuit CHECK (circuit IN ('closed', 'open', 'half_open'))
);
CREATE TABLE outbox_relay (
    name VARCHAR(200) COLLATE "C" NOT NULL, host VARCHAR(255) COLLATE "C" NOT NULL, pid INTEGER NOT NULL,
    version VARCHAR(50) COLLATE "C" NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    seen_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL, term BIGINT,
    leads_until TIMESTAMP WITH TIME ZONE, PRIMARY KEY (name)
);
CREATE TABLE outbox_leader (
    name VARCHAR(50) COLLATE "C" NOT NULL, relay VARCHAR(200) COLLATE "C" NOT NULL, term BIGINT NOT NULL,
    leads_until TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL, PRIMARY KEY (name)
);
CREATE TABLE outbox_audit (
    id BIGINT GENERATED ALWAYS AS IDENTITY, at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    actor VARCHAR(200) COLLATE "C" NOT NULL, action VARCHAR(50) COLLATE "C" NOT NULL, details JSONB NOT NULL,
    affected INTEGER DEFAULT 0 NOT NULL, PRIMARY KEY (id)
);
CREATE INDEX idx_outbox_audit_at ON outbox_audit (at);
CREATE TABLE outbox_stats (
    minute TIMESTAMP WITH TIME ZONE NOT NULL, destination VARCHAR(100) COLLATE "C" NOT NULL,
    relay VARCHAR(200) COLLATE "C" NOT NULL, delivered INTEGER DEFAULT 0 NOT NULL,
    retried INTEGER DEFAULT 0 NOT NULL, failed INTEGER DEFAULT 0 NOT NULL, lag JSONB NOT NULL,
    PRIMARY KEY (minute, destination, relay)
);
CREATE TABLE inbox_message (
    consumer VARCHAR(100) COLLATE "C" NOT NULL, message_id VARCHAR(255) COLLATE "C" NOT NULL,
    processed_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    PRIMARY KEY (consumer, message_id)
);
CREATE INDEX idx_inbox_message_processed ON inbox_message (processed_at);
INSERT INTO outbox_migration (version) VALUES (1);
