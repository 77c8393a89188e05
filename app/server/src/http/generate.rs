//! The two interfaces that generate: from a request's bytes to its answer, whole or as a stream of events.

use super::answer::{Choice, Frame, characters_begun, error_of, stats_of, with_counts};
use super::error::{ApiError, ErrorBody};
use super::request::{self, Ask, Surface};
use super::{RequestId, Shared, json, read};
use crate::admission::{Place, Ticket};
use crate::fleet::{FleetError, Lease};
use crate::job::{JobEvent, JobFailure, PromptLoss, Resident};
use crate::metrics::{ModelLabels, OutcomeLabels};
use crate::wire::{ChatCompletion, ChatRequest, Completion, CompletionRequest, Stats, Usage};
use crate::worker::link::JobEvents;
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderValue, Response, StatusCode, header};
use futures_util::stream;
use npuhal_models::stats::GenerationStats;
use npuhal_models::window::{PromptTruncation, Truncation};
use serde::Serialize;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::mpsc;
use tokio::time::{Sleep, sleep_until};

/// Time beside its limit that a worker has to tell that a job's time is over.
const GRACE: Duration = Duration::from_secs(5);

/// Answers a conversation.
#[utoipa::path(
    post, path = "/v1/chat/completions", request_body = ChatRequest, security(("bearer" = [])),
    responses(
        (status = 200, description = "The answer, or with `stream` server-sent events of chunks and `[DONE]`", content(
            (ChatCompletion = "application/json"), (String = "text/event-stream")
        )),
        Failures,
    )
)]
pub(super) async fn chat(State(service): State<Shared>, request: Request) -> Response<Body> {
    answer(&service, request, Surface::Chat).await
}

/// Continues a text.
#[utoipa::path(
    post, path = "/v1/completions", request_body = CompletionRequest, security(("bearer" = [])),
    responses(
        (status = 200, description = "The answer, or with `stream` server-sent events of chunks and `[DONE]`", content(
            (Completion = "application/json"), (String = "text/event-stream")
        )),
        Failures,
    )
)]
pub(super) async fn text(State(service): State<Shared>, request: Request) -> Response<Body> {
    answer(&service, request, Surface::Text).await
}

async fn answer(service: &Shared, request: Request, surface: Surface) -> Response<Body> {
    match respond(service, request, surface).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn respond(service: &Shared, request: Request, surface: Surface) -> Result<Response<Body>, ApiError> {
    let arrived = Instant::now();
    if service.admission.is_draining() {
        let (parts, body) = request.into_parts();
        read::discard(&parts.headers, body).await;
        return Err(ApiError::shutting_down());
    }
    let client = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip());
    let client = client.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    if let Err(wait) = service.rate_limit.admit(client, arrived) {
        let (parts, body) = request.into_parts();
        read::discard(&parts.headers, body).await;
        return Err(ApiError::rate_limited(wait));
    }
    let id = request.extensions().get::<RequestId>().map(|id| id.0.replacen("req-", "", 1)).unwrap_or_default();
    let (parts, body) = request.into_parts();
    let bytes = read::body(&parts.headers, body, service.max_body_bytes, service.body_limit).await?;
    let ask = request::parse(surface, &bytes, service.max_chars)?;
    drop(bytes);
    let model = match &ask.model {
        None => service.fleet.default_model(),
        Some(id) => service.fleet.find(id).ok_or_else(|| ApiError::model_not_found(id))?,
    };
    let ticket = service.admission.enter().ok_or_else(ApiError::queue_full)?;
    // The end of the service may have begun while the body was read.
    if service.admission.is_draining() {
        return Err(ApiError::shutting_down());
    }
    let deadline = arrived + service.request_limit;
    let generation = Generation::begin(service, ticket, model, ask, &id, arrived, deadline).await?;
    if generation.stream { Ok(generation.into_stream()) } else { generation.whole().await }
}

/// What can be answered instead.
#[derive(utoipa::IntoResponses)]
#[expect(dead_code, reason = "documentation only: errors are made in one place, with the status at run time")]
enum Failures {
    /// A field or the body as a whole is wrong, or the prompt is longer than the context.
    #[response(status = 400)]
    Invalid(ErrorBody),
    /// No key, or a wrong one.
    #[response(status = 401)]
    Unauthorized(ErrorBody),
    /// No key is wanted, and the request comes from a page of another site.
    #[response(status = 403)]
    ForeignPage(ErrorBody),
    /// No such model.
    #[response(status = 404)]
    ModelNotFound(ErrorBody),
    /// The body did not come in time.
    #[response(status = 408)]
    BodyTimedOut(ErrorBody),
    /// A body without a length.
    #[response(status = 411)]
    LengthRequired(ErrorBody),
    /// A body above the limit.
    #[response(status = 413)]
    TooLarge(ErrorBody),
    /// The queue is full, or the client asks too often.
    #[response(status = 429)]
    TooMany(ErrorBody),
    /// The device or the worker failed.
    #[response(status = 500)]
    Failed(ErrorBody),
    /// Shutting down, or no model is ready.
    #[response(status = 503)]
    Unavailable(ErrorBody),
    /// It took too long.
    #[response(status = 504)]
    TimedOut(ErrorBody),
}

/// A running job and what its answer is made of.
struct Generation {
    service: Shared,
    frame: Frame,
    events: JobEvents,
    resident: Resident,
    stream: bool,
    model: String,
    arrived: Instant,
    /// Ends [`GRACE`] after the time of the job.
    overdue: Pin<Box<Sleep>>,
    usage: Usage,
    stats: Option<Stats>,
    truncation: PromptLoss,
    /// When the latest piece of each choice came.
    latest_pieces: HashMap<u32, Instant>,
    is_counted: bool,
    // Held as long as the job runs.
    _lease: Lease,
    _place: Place,
    _ticket: Ticket,
}

impl Generation {
    /// Waits for a place, then for the model, then for the worker to accept the prompt.
    async fn begin(
        service: &Shared,
        ticket: Ticket,
        model: usize,
        ask: Ask,
        id: &str,
        arrived: Instant,
        deadline: Instant,
    ) -> Result<Self, ApiError> {
        let rows = ask.job.choices.min(service.fleet.parallel());
        let place = async { service.admission.place(rows).await.ok_or_else(ApiError::shutting_down) };
        let place = at(deadline, place).await.unwrap_or_else(|| Err(ApiError::timed_out()))?;
        let mut job = ask.job.clone();
        let mut is_second = false;
        // A worker may have died without anybody having noticed; what had not begun there is begun on the next one.
        let (lease, events, first) = loop {
            let leasing = async {
                service.fleet.lease(model).await.map_err(|error| match error {
                    FleetError::Closed => ApiError::shutting_down(),
                    _ => ApiError::model_unavailable(),
                })
            };
            let lease = at(deadline, leasing).await.unwrap_or_else(|| Err(ApiError::timed_out()))?;
            let remaining = deadline.saturating_duration_since(Instant::now());
            job.time_limit_ms = u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX);
            let mut events = lease.run(job.clone());
            let first = at(deadline + GRACE, events.next()).await;
            let first = first.unwrap_or(Some(JobEvent::Failed(JobFailure::TimedOut)));
            if is_second || !matches!(first, Some(JobEvent::Failed(JobFailure::WorkerLost))) {
                break (lease, events, first);
            }
            is_second = true;
        };
        let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let name = service.fleet.models()[model].id.clone();
        let frame = Frame::new(&ask, id, created, &name);
        let resident = lease.resident().clone();
        // Told anew when the worker accepts the prompt.
        let truncation = match ask.surface {
            Surface::Chat => PromptLoss::Chat(Truncation::default()),
            Surface::Text => PromptLoss::Text(PromptTruncation::default()),
        };
        let mut generation = Self {
            service: Shared::clone(service),
            events,
            frame,
            resident,
            stream: ask.stream,
            model: name,
            arrived,
            overdue: Box::pin(sleep_until((deadline + GRACE).into())),
            usage: Usage::default(),
            stats: None,
            truncation,
            latest_pieces: HashMap::new(),
            is_counted: false,
            _lease: lease,
            _place: place,
            _ticket: ticket,
        };
        match generation.note(first) {
            Ok(_) => Ok(generation),
            Err(failure) => Err(error_of(&failure, generation.frame.surface)),
        }
    }

    /// The next event.
    async fn next(&mut self) -> Result<Option<JobEvent>, JobFailure> {
        let event = tokio::select! {
            biased;
            event = self.events.next() => event,
            () = self.overdue.as_mut() => Some(JobEvent::Failed(JobFailure::TimedOut)),
        };
        self.note(event)
    }

    /// Counts what is to be counted.
    fn note(&mut self, event: Option<JobEvent>) -> Result<Option<JobEvent>, JobFailure> {
        match event {
            Some(JobEvent::Failed(failure)) => {
                self.count_failure(&failure);
                Err(failure)
            }
            Some(JobEvent::Started { truncation, .. }) => {
                self.truncation = truncation;
                Ok(event)
            }
            Some(JobEvent::Piece { choice, .. }) => {
                let (now, is_first) = (Instant::now(), self.latest_pieces.is_empty());
                let before = self.latest_pieces.insert(choice, now);
                let (metrics, labels) = (self.metrics(), self.labels());
                if is_first {
                    let waited = now.saturating_duration_since(self.arrived);
                    metrics.first_token.get_or_create(&labels).observe(waited.as_secs_f64());
                }
                if let Some(before) = before {
                    let between = now.saturating_duration_since(before);
                    metrics.inter_token.get_or_create(&labels).observe(between.as_secs_f64());
                }
                Ok(event)
            }
            Some(JobEvent::ContextRebuilt) => {
                self.metrics().context_rebuilds.get_or_create(&self.labels()).inc();
                Ok(event)
            }
            Some(JobEvent::ChoiceEnded { ref stats, .. }) => {
                self.count_choice(stats);
                Ok(event)
            }
            Some(JobEvent::Finished) => {
                self.count_outcome("completed");
                self.metrics().duration.get_or_create(&self.labels()).observe(self.arrived.elapsed().as_secs_f64());
                Ok(None)
            }
            other => Ok(other),
        }
    }

    fn metrics(&self) -> &crate::metrics::Metrics {
        &self.service.metrics
    }

    fn labels(&self) -> ModelLabels {
        let (route, device) = (self.resident.route.clone(), self.resident.device.clone());
        ModelLabels { model: self.model.clone(), route, device }
    }

    fn count_choice(&mut self, stats: &GenerationStats) {
        self.usage = with_counts(self.usage, stats);
        self.stats = Some(stats_of(stats, &self.resident, self.truncation));
        let (metrics, labels) = (self.metrics(), self.labels());
        let count = |number: usize| number as u64;
        metrics.prompt_tokens.get_or_create(&labels).inc_by(count(stats.prompt_tokens));
        metrics.generated_tokens.get_or_create(&labels).inc_by(count(stats.generated_tokens));
        if stats.cached_prompt_tokens > 0 {
            metrics.cached_tokens.get_or_create(&labels).inc_by(count(stats.cached_prompt_tokens));
            metrics.prefix_hits.get_or_create(&labels).inc();
        }
    }

    fn count_failure(&mut self, failure: &JobFailure) {
        let (metrics, labels) = (self.metrics(), self.labels());
        let outcome = match failure {
            JobFailure::ContextLengthExceeded { .. } | JobFailure::Invalid { .. } => "refused",
            JobFailure::TimedOut => "timed_out",
            JobFailure::Cancelled => "cancelled",
            JobFailure::DeviceTimedOut => {
                metrics.device_timeouts.get_or_create(&labels).inc();
                "device_timeout"
            }
            JobFailure::Device => {
                metrics.device_failures.get_or_create(&labels).inc();
                "device_failure"
            }
            JobFailure::WorkerLost => "worker_lost",
        };
        self.count_outcome(outcome);
    }

    fn count_outcome(&mut self, outcome: &'static str) {
        if !std::mem::replace(&mut self.is_counted, true) {
            let labels = OutcomeLabels { model: self.model.clone(), outcome };
            self.metrics().streams.get_or_create(&labels).inc();
        }
    }

    async fn whole(mut self) -> Result<Response<Body>, ApiError> {
        let mut choices: Vec<Choice> = Vec::new();
        loop {
            match self.next().await {
                Ok(Some(JobEvent::Piece { choice, text, reasoning, logprobs })) => {
                    let choice = at_index(&mut choices, choice);
                    choice.text.push_str(&text);
                    choice.reasoning.push_str(&reasoning);
                    choice.logprobs.extend(logprobs);
                }
                Ok(Some(JobEvent::ChoiceEnded { choice, finish_reason, .. })) => {
                    let choice = at_index(&mut choices, choice);
                    choice.finish = Some(finish_reason);
                    choice.stats = self.stats.take();
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(failure) => return Err(error_of(&failure, self.frame.surface)),
            }
        }
        Ok(json(StatusCode::OK, &self.frame.whole(choices, self.usage)))
    }

    /// Runs on a task of its own, so that a slow client does not hold up the device; what it does not take in is bounded.
    fn into_stream(self) -> Response<Body> {
        let (outbox, inbox) = outbox();
        tokio::spawn(self.send(outbox));
        let events = stream::unfold(inbox, |mut inbox| async move {
            let event = inbox.next().await?;
            Some((Ok::<_, Infallible>(event), inbox))
        });
        let mut response = Response::new(Body::from_stream(events));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
        response
    }

    async fn send(mut self, outbox: Outbox) {
        // Characters that begin in its tokens that were told, for each choice that was opened.
        let mut told_chars: HashMap<u32, usize> = HashMap::new();
        // News of the worker that tell the client nothing do not end its silence.
        let mut last_sent = Instant::now();
        let heartbeat = self.service.heartbeat;
        // Neither is made anew for each token.
        let (closed, silence) = (outbox.closed(), sleep_until((last_sent + heartbeat).into()));
        tokio::pin!(closed, silence);
        loop {
            let next = tokio::select! {
                biased;
                () = closed.as_mut() => {
                    self.count_outcome("disconnected");
                    return;
                }
                next = self.next() => next,
                () = silence.as_mut() => {
                    if last_sent.elapsed() >= heartbeat {
                        last_sent = Instant::now();
                        // A comment; it tells proxies and clients that the prompt is still being computed.
                        outbox.put(Bytes::from_static(b": working\n\n"));
                    }
                    silence.as_mut().reset((last_sent + heartbeat).into());
                    continue;
                }
            };
            let before = self.frame.echo().chars().count();
            let frame = &self.frame;
            let mut open = |choice: u32| match told_chars.entry(choice) {
                Entry::Occupied(_) => None,
                Entry::Vacant(entry) => {
                    entry.insert(before);
                    frame.opening(choice)
                }
            };
            let chunks = match next {
                Ok(Some(JobEvent::Piece { choice, text, reasoning, logprobs })) => {
                    let opening = open(choice);
                    let told = told_chars.entry(choice).or_insert(before);
                    let piece = frame.piece(choice, &text, &reasoning, &logprobs, *told);
                    *told += logprobs.iter().map(|entry| characters_begun(&entry.chosen.bytes)).sum::<usize>();
                    vec![opening, Some(piece)]
                }
                Ok(Some(JobEvent::ChoiceEnded { choice, finish_reason, .. })) => {
                    vec![open(choice), Some(frame.ending(choice, finish_reason, self.stats.take()))]
                }
                Ok(Some(_)) => Vec::new(),
                Ok(None) => {
                    if let Some(counts) = self.frame.counts(self.usage) {
                        outbox.put(event(&counts));
                    }
                    outbox.put(Bytes::from_static(b"data: [DONE]\n\n"));
                    return;
                }
                Err(failure) => {
                    let body = error_of(&failure, self.frame.surface).body();
                    outbox.put(event(&body));
                    return;
                }
            };
            for chunk in chunks.into_iter().flatten() {
                last_sent = Instant::now();
                outbox.put(event(&chunk));
            }
            if outbox.is_full() {
                self.count_outcome("slow_reader");
                outbox.put(event(&ApiError::slow_reader().body()));
                return;
            }
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.count_outcome("disconnected");
    }
}

/// Bytes of a stream that a client has not taken in, above which it is given up.
const MAX_UNREAD_BYTES: usize = 4 << 20;

/// Where the events of a stream are put until the client takes them in.
struct Outbox {
    events: mpsc::UnboundedSender<Bytes>,
    unread_bytes: Arc<AtomicUsize>,
}

/// The other end of an [`Outbox`].
struct Inbox {
    events: mpsc::UnboundedReceiver<Bytes>,
    unread_bytes: Arc<AtomicUsize>,
}

fn outbox() -> (Outbox, Inbox) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let unread_bytes = Arc::new(AtomicUsize::new(0));
    let outbox = Outbox { events: sender, unread_bytes: Arc::clone(&unread_bytes) };
    (outbox, Inbox { events: receiver, unread_bytes })
}

impl Outbox {
    fn put(&self, event: Bytes) {
        self.unread_bytes.fetch_add(event.len(), Ordering::Relaxed);
        // A client that is gone is seen by `closed`.
        let _ = self.events.send(event);
    }

    fn is_full(&self) -> bool {
        self.unread_bytes.load(Ordering::Relaxed) > MAX_UNREAD_BYTES
    }

    /// Waits until the client has gone.
    async fn closed(&self) {
        self.events.closed().await;
    }
}

impl Inbox {
    async fn next(&mut self) -> Option<Bytes> {
        let event = self.events.recv().await?;
        self.unread_bytes.fetch_sub(event.len(), Ordering::Relaxed);
        Some(event)
    }
}

/// One server-sent event.
fn event(value: &impl Serialize) -> Bytes {
    let mut bytes = b"data: ".to_vec();
    // Values of this crate are plain data.
    if let Err(error) = serde_json::to_writer(&mut bytes, value) {
        tracing::error!(%error, "an event could not be written");
    }
    bytes.extend_from_slice(b"\n\n");
    Bytes::from(bytes)
}

fn at_index(choices: &mut Vec<Choice>, index: u32) -> &mut Choice {
    let index = index as usize;
    if choices.len() <= index {
        choices.resize_with(index + 1, Choice::default);
    }
    &mut choices[index]
}

/// The result of `future` if it comes before `deadline`.
async fn at<T>(deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout_at(deadline.into(), future).await.ok()
}
