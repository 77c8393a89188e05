//! Errors of the interface: OpenAI's form, with a stable `code` and the `param` where there is one.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde::Serialize;
use std::borrow::Cow;
use std::time::Duration;
use utoipa::ToSchema;

/// Body of every error.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ErrorDetail {
    /// For people.
    pub message: String,
    /// Class of the error, e.g. `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field it is about.
    pub param: Option<String>,
    /// Stable name of the error.
    pub code: Option<&'static str>,
}

/// An answer other than the one that was asked for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) detail: ErrorDetail,
    pub(crate) retry_after: Option<Duration>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        let detail = ErrorDetail { message: message.into(), kind, param: None, code: Some(code) };
        Self { status, detail, retry_after: None }
    }

    fn about(mut self, param: impl Into<String>) -> Self {
        self.detail.param = Some(param.into());
        self
    }

    fn retry_after(self, seconds: u64) -> Self {
        Self { retry_after: Some(Duration::from_secs(seconds)), ..self }
    }

    /// A field of the body.
    pub(crate) fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, "invalid_value", message).about(param.into())
    }

    /// The body as a whole.
    pub(crate) fn bad_body(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, code, message)
    }

    pub(crate) fn context_length(prompt_tokens: usize, context: usize, param: &'static str) -> Self {
        let message = format!(
            "this model's context is {context} tokens, but the prompt has {prompt_tokens}; shorten it, or serve the model \
             with a longer context"
        );
        Self::new(StatusCode::BAD_REQUEST, INVALID, "context_length_exceeded", message).about(param)
    }

    pub(crate) fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, INVALID, "not_found", "not found")
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "this path does not know the method of the request";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed", message)
    }

    pub(crate) fn model_not_found(id: &str) -> Self {
        let shown: String = id.chars().take(100).collect();
        let message = format!("model '{shown}' is not installed");
        Self::new(StatusCode::NOT_FOUND, "model_not_found", "model_not_found", message).about("model")
    }

    pub(crate) fn unauthorized() -> Self {
        let message = "missing or invalid bearer token";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", message)
    }

    pub(crate) fn foreign_page() -> Self {
        let message = "without a key only this machine is answered: the Origin or Host of the request is another; give the \
                       server a key (--api-key), or name the origin (--cors-origin)";
        Self::new(StatusCode::FORBIDDEN, "permission_error", "origin_not_allowed", message)
    }

    pub(crate) fn shutting_down() -> Self {
        let message = "server is shutting down";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_unavailable", "shutting_down", message).retry_after(1)
    }

    pub(crate) fn model_unavailable() -> Self {
        let message = "the model cannot be made ready; the log of the server says why";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_unavailable", "model_unavailable", message).retry_after(5)
    }

    pub(crate) fn rate_limited(retry_after: Duration) -> Self {
        let message = "rate limit exceeded";
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded", message);
        // A client that came a moment earlier would be refused again.
        error.retry_after(retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0))
    }

    pub(crate) fn queue_full() -> Self {
        let message = "the request queue is full";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "server_overloaded", "queue_full", message).retry_after(1)
    }

    pub(crate) fn length_required() -> Self {
        let message = "Content-Length is required";
        Self::new(StatusCode::LENGTH_REQUIRED, INVALID, "length_required", message)
    }

    pub(crate) fn body_too_large(limit_bytes: usize) -> Self {
        let message = format!("request body is too large; at most {limit_bytes} bytes are read");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, "request_too_large", message)
    }

    pub(crate) fn body_timed_out() -> Self {
        let message = "request body timed out";
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", "request_timeout", message)
    }

    pub(crate) fn timed_out() -> Self {
        let message = "inference request timed out";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", "inference_timeout", message)
    }

    pub(crate) fn slow_reader() -> Self {
        let message = "the client takes in its answer too slowly";
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", "slow_reader", message)
    }

    pub(crate) fn device_timed_out() -> Self {
        let message = "the device did not answer in time; the next request gets a fresh context";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "device_timeout", message)
    }

    pub(crate) fn worker_lost() -> Self {
        let message = "the worker ended before the answer was complete; it is being replaced";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "worker_lost", message)
    }

    pub(crate) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "internal_error", "internal inference error")
    }

    /// Its body.
    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody { error: self.detail.clone() }
    }

    pub(crate) fn into_response(self) -> Response<Body> {
        let mut response = super::json(self.status, &self.body());
        if let Some(wait) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(wait.as_secs().max(1)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";
