CREATE TABLE outbox_migration (
    version INTEGER NOT NULL,
    applied_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL,
    PRIMARY KEY (version)
);
CREATE TABLE outbox_event (
    id CHAR(32) NOT NULL, event_id CHAR(32) NOT NULL, destination VARCHAR(100) NOT NULL,
    aggregate_type VARCHAR(100) NOT NULL, aggregate_id VARCHAR(255) NOT NULL,
    event_type VARCHAR(100) NOT NULL, payload TEXT, payload_data BLOB, payload_encoding VARCHAR(50),
    headers TEXT NOT NULL, ordering_key VARCHAR(255), position BIGINT NOT NULL DEFAULT 0,
    status VARCHAR(20) DEFAULT 'pending' NOT NULL, idempotency_key VARCHAR(255) NOT NULL,
    attempts INTEGER DEFAULT 0 NOT NULL, max_attempts INTEGER DEFAULT 5 NOT NULL,
    crashes INTEGER DEFAULT 0 NOT NULL,
    next_attempt_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'), leased_until DATETIME,
    lease_token CHAR(32), lease_owner VARCHAR(200),
    created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL,
    updated_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL,
    last_attempt_at DATETIME, delivered_at DATETIME, error_message TEXT, PRIMARY KEY (id),
    CONSTRAINT outbox_event_status CHECK (status IN ('pending', 'delivered', 'failed', 'discarded')),
    CONSTRAINT outbox_event_lease CHECK ((leased_until IS NULL) = (lease_token IS NULL) AND (lease_token IS NULL) = (lease_owner IS NULL)),
    CONSTRAINT outbox_event_final CHECK (status = 'pending' OR (next_attempt_at IS NULL AND leased_until IS NULL)),
    CONSTRAINT outbox_event_parked CHECK (status <> 'pending' OR next_attempt_at IS NOT NULL OR ordering_key IS NOT NULL),
    CONSTRAINT outbox_event_delivered CHECK ((status = 'delivered') = (delivered_at IS NOT NULL)),
    CONSTRAINT outbox_event_payload CHECK ((payload IS NULL) <> (payload_data IS NULL) AND (payload_data IS NULL) = (payload_encoding IS NULL)),
    CONSTRAINT outbox_event_counts CHECK (attempts >= 0 AND max_attempts >= 1 AND crashes >= 0)
);
CREATE INDEX idx_outbox_event_aggregate ON outbox_event (aggregate_type, aggregate_id);
CREATE INDEX idx_outbox_event_delivered ON outbox_event (destination, delivered_at) WHERE status = 'delivered';
CREATE INDEX idx_outbox_event_failed ON outbox_event (destination, position) WHERE status = 'failed';
CREATE INDEX idx_outbox_event_key_head ON outbox_event (destination, ordering_key, position) WHERE status IN ('pending', 'failed') AND ordering_key IS NOT NULL;
CREATE INDEX idx_outbox_event_pending_next_attempt ON outbox_event (destination, next_attempt_at, position) WHERE status = 'pending';
CREATE TABLE "outbox_position" (id INTEGER PRIMARY KEY CHECK (id = 1), value BIGINT NOT NULL);
INSERT INTO "outbox_position" (id, value) VALUES (1, 0);
CREATE TRIGGER "outbox_event_position" AFTER INSERT ON "outbox_event" BEGIN
    UPDATE "outbox_position" SET value = value + 1;
    UPDATE "outbox_event" SET position = (SELECT value FROM "outbox_position") WHERE id = NEW.id;
END;
CREATE TABLE outbox_idempotency (
    event_type VARCHAR(100) NOT NULL, idempotency_key VARCHAR(255) NOT NULL, event_id CHAR(32) NOT NULL,
    created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL,
    PRIMARY KEY (event_type, idempotency_key)
);
CREATE INDEX idx_outbox_idempotency_created ON outbox_idempotency (created_at);
CREATE TABLE outbox_attempt (
    delivery_id CHAR(32) NOT NULL, attempt INTEGER NOT NULL,
    failed_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL,
    relay VARCHAR(200) NOT NULL, error_message TEXT NOT NULL, PRIMARY KEY (delivery_id, attempt)
);
CREATE TABLE outbox_destination (
    name VARCHAR(100) NOT NULL, paused_at DATETIME, paused_until DATETIME, paused_by VARCHAR(200),
    pause_reason TEXT, circuit VARCHAR(20) DEFAULT 'closed' NOT NULL, circuit_until DATETIME,
    circuit_reason TEXT, rate_at DATETIME,
    updated_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL, PRIMARY KEY (name),
    CONSTRAINT outbox_destination_circuit CHECK (circuit IN ('closed', 'open', 'half_open'))
);
CREATE TABLE outbox_relay (
    name VARCHAR(200) NOT NULL, host VARCHAR(255) NOT NULL, pid INTEGER NOT NULL,
    version VARCHAR(50) NOT NULL,
    started_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL,
    seen_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL, term BIGINT,
    leads_until DATETIME, PRIMARY KEY (name)
);
CREATE TABLE outbox_leader (
    name VARCHAR(50) NOT NULL, relay VARCHAR(200) NOT NULL, term BIGINT NOT NULL,
    leads_until DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL, PRIMARY KEY (name)
);
CREATE TABLE outbox_audit (
    id INTEGER NOT NULL, at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL,
    actor VARCHAR(200) NOT NULL, action VARCHAR(50) NOT NULL, details TEXT NOT NULL,
    affected INTEGER DEFAULT 0 NOT NULL, PRIMARY KEY (id)
);
CREATE INDEX idx_outbox_audit_at ON outbox_audit (at);
CREATE TABLE outbox_stats (
    minute DATETIME NOT NULL, destination VARCHAR(100) NOT NULL, relay VARCHAR(200) NOT NULL,
    delivered INTEGER DEFAULT 0 NOT NULL, retried INTEGER DEFAULT 0 NOT NULL,
    failed INTEGER DEFAULT 0 NOT NULL, lag TEXT NOT NULL, PRIMARY KEY (minute, destination, relay)
);
CREATE TABLE inbox_message (
    consumer VARCHAR(100) NOT NULL, message_id VARCHAR(255) NOT NULL,
    processed_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now') || '000') NOT NULL,
    PRIMARY KEY (consumer, message_id)
);
CREATE INDEX idx_inbox_message_processed ON inbox_message (processed_at);
INSERT INTO outbox_migration (version) VALUES (1);
