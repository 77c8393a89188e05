//! Puts bounds into a parsed template.
//!
//! Operators and filters of the template language make values without asking anybody. The tree is therefore copied with every
//! operation that can make text or lists led through functions of [`super::bounds`], whose names no template can spell.

use super::bounds::{ADD, CHECKED, CONCAT, INDEXED, KEPT, MADE, MUL};
use crate::text_error::TextError;
use minijinja::machinery::ast::{self, CallArg, Expr, Spanned, Stmt};
use minijinja::machinery::{Span, Token, WhitespaceConfig, tokenize};
use minijinja::value::Value;

/// Bytes of the longest template.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Tokens between the delimiters of one tag: bounds the depth of an expression.
const MAX_TAG_TOKENS: usize = 600;
/// `elif` branches of a template: bounds the depth of a chain.
const MAX_ELIF: usize = 200;

/// Refuses templates so deep or long that parsing them would exhaust the stack.
pub(super) fn check_shape(source: &str, whitespace: WhitespaceConfig) -> Result<(), TextError> {
    let limit = |what, limit: usize| TextError::TemplateLimit { what, limit: limit as u64 };
    if source.len() > MAX_TEMPLATE_BYTES {
        return Err(limit("bytes of source", MAX_TEMPLATE_BYTES));
    }
    let (mut in_tag, mut elifs) = (0, 0);
    // Errors of the tokenizer come again, with their place, from the parser.
    for token in tokenize(source, false, Default::default(), whitespace).map_while(Result::ok) {
        match token.0 {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => in_tag = 0,
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        in_tag += 1;
        if in_tag > MAX_TAG_TOKENS {
            return Err(limit("tokens in one tag", MAX_TAG_TOKENS));
        }
        if elifs > MAX_ELIF {
            return Err(limit("elif branches", MAX_ELIF));
        }
    }
    Ok(())
}

/// What a chat template may not do, and where.
pub(super) struct Refused {
    pub(super) what: &'static str,
    pub(super) line: usize,
}

/// The template with its bounds.
pub(super) fn bounded<'a>(template: &Stmt<'a>) -> Result<Stmt<'a>, Refused> {
    stmt(template)
}

fn node<T>(value: T, span: Span) -> Spanned<T> {
    Spanned::new(value, span)
}

fn stmts<'a>(all: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, Refused> {
    all.iter().map(stmt).collect()
}

fn stmt<'a>(old: &Stmt<'a>) -> Result<Stmt<'a>, Refused> {
    let refuse = |what, span: Span| Err(Refused { what, line: usize::from(span.start_line) });
    Ok(match old {
        Stmt::Template(s) => Stmt::Template(node(ast::Template { children: stmts(&s.children)? }, s.span())),
        Stmt::EmitExpr(s) => Stmt::EmitExpr(node(ast::EmitExpr { expr: expr(&s.expr) }, s.span())),
        // Raw text becomes an expression, so that it passes the formatter, which counts.
        Stmt::EmitRaw(s) => {
            let raw = Expr::Const(node(ast::Const { value: Value::from(s.raw) }, s.span()));
            Stmt::EmitExpr(node(ast::EmitExpr { expr: raw }, s.span()))
        }
        Stmt::ForLoop(s) => Stmt::ForLoop(node(
            ast::ForLoop {
                target: plain(&s.target),
                iter: checked(&s.iter),
                filter_expr: s.filter_expr.as_ref().map(expr),
                recursive: s.recursive,
                body: stmts(&s.body)?,
                else_body: stmts(&s.else_body)?,
            },
            s.span(),
        )),
        Stmt::IfCond(s) => Stmt::IfCond(node(
            ast::IfCond { expr: expr(&s.expr), true_body: stmts(&s.true_body)?, false_body: stmts(&s.false_body)? },
            s.span(),
        )),
        Stmt::WithBlock(s) => {
            let assignments = s.assignments.iter().map(|(target, value)| (plain(target), expr(value))).collect();
            Stmt::WithBlock(node(ast::WithBlock { assignments, body: stmts(&s.body)? }, s.span()))
        }
        Stmt::Set(s) => {
            // A namespace outlives its statement: what it keeps must not nest without end.
            let value = match s.target {
                Expr::GetAttr(_) => call(KEPT, [expr(&s.expr)], s.span()),
                _ => expr(&s.expr),
            };
            Stmt::Set(node(ast::Set { target: plain(&s.target), expr: value }, s.span()))
        }
        Stmt::SetBlock(s) => Stmt::SetBlock(node(
            ast::SetBlock {
                target: plain(&s.target),
                filter: s.filter.as_ref().map(block_filter),
                body: stmts(&s.body)?,
            },
            s.span(),
        )),
        Stmt::AutoEscape(s) => return refuse("autoescape", s.span()),
        Stmt::FilterBlock(s) => Stmt::FilterBlock(node(
            ast::FilterBlock { filter: block_filter(&s.filter), body: stmts(&s.body)? },
            s.span(),
        )),
        Stmt::Macro(s) => Stmt::Macro(node(macro_decl(s)?, s.span())),
        Stmt::CallBlock(s) => Stmt::CallBlock(node(
            ast::CallBlock {
                call: node(call_parts(&s.call), s.call.span()),
                macro_decl: node(macro_decl(&s.macro_decl)?, s.macro_decl.span()),
            },
            s.span(),
        )),
        Stmt::Continue(s) => Stmt::Continue(node(ast::Continue, s.span())),
        Stmt::Break(s) => Stmt::Break(node(ast::Break, s.span())),
        Stmt::Do(s) => Stmt::Do(node(ast::Do { call: node(call_parts(&s.call), s.call.span()) }, s.span())),
        Stmt::Block(s) => return refuse("block", s.span()),
        Stmt::Import(s) => return refuse("import", s.span()),
        Stmt::FromImport(s) => return refuse("import", s.span()),
        Stmt::Extends(s) => return refuse("extends", s.span()),
        Stmt::Include(s) => return refuse("include", s.span()),
    })
}

fn macro_decl<'a>(old: &ast::Macro<'a>) -> Result<ast::Macro<'a>, Refused> {
    Ok(ast::Macro {
        name: old.name,
        args: old.args.iter().map(plain).collect(),
        defaults: old.defaults.iter().map(expr).collect(),
        body: stmts(&old.body)?,
    })
}

/// A call of `function`, one of ours.
fn call<'a, const N: usize>(function: &'static str, args: [Expr<'a>; N], span: Span) -> Expr<'a> {
    let callee = Expr::Var(node(ast::Var { id: function }, span));
    let args = args.into_iter().map(CallArg::Pos).collect();
    Expr::Call(node(ast::Call { expr: callee, args }, span))
}

/// `old` with its parts bounded, led through the check unless it is a constant.
fn checked<'a>(old: &Expr<'a>) -> Expr<'a> {
    led_through(CHECKED, old)
}

/// As [`checked`], where one element or the length is read.
fn indexed<'a>(old: &Expr<'a>) -> Expr<'a> {
    led_through(INDEXED, old)
}

fn led_through<'a>(function: &'static str, old: &Expr<'a>) -> Expr<'a> {
    let new = expr(old);
    match old {
        Expr::Const(_) => new,
        // `self` and `caller` are known to the compiler by name.
        Expr::Var(var) if matches!(var.id, "self" | "caller" | "loop") => new,
        // These are checked already.
        Expr::Filter(_) | Expr::Call(_) | Expr::Slice(_) => new,
        _ => {
            let span = span_of(old);
            call(function, [new], span)
        }
    }
}

/// `old` with its parts bounded.
fn expr<'a>(old: &Expr<'a>) -> Expr<'a> {
    match old {
        Expr::BinOp(e) => {
            let function = match e.op {
                ast::BinOpKind::Add => Some(ADD),
                ast::BinOpKind::Mul => Some(MUL),
                ast::BinOpKind::Concat => Some(CONCAT),
                _ => None,
            };
            if let Some(function) = function {
                return call(function, [expr(&e.left), expr(&e.right)], e.span());
            }
            let short_circuit = matches!(e.op, ast::BinOpKind::ScAnd | ast::BinOpKind::ScOr);
            let side = if short_circuit { expr } else { checked };
            Expr::BinOp(node(ast::BinOp { op: e.op, left: side(&e.left), right: side(&e.right) }, e.span()))
        }
        Expr::Compare(e) => {
            let ops = e.ops.iter().map(|op| ast::CompareOp { op: op.op, expr: checked(&op.expr) }).collect();
            Expr::Compare(node(ast::Compare { expr: checked(&e.expr), ops }, e.span()))
        }
        Expr::Slice(e) => {
            let slice = ast::Slice {
                expr: checked(&e.expr),
                start: e.start.as_ref().map(expr),
                stop: e.stop.as_ref().map(expr),
                step: e.step.as_ref().map(expr),
            };
            call(MADE, [Expr::Slice(node(slice, e.span()))], e.span())
        }
        Expr::Filter(e) => call(MADE, [Expr::Filter(node(filter_parts(e), e.span()))], e.span()),
        Expr::Test(e) => {
            // Tests with arguments compare; the others look at the kind of a value.
            let side = if e.args.is_empty() { expr } else { checked };
            let test = ast::Test { name: e.name, expr: side(&e.expr), args: args(&e.args) };
            Expr::Test(node(test, e.span()))
        }
        Expr::Call(e) => call(MADE, [Expr::Call(node(call_parts(e), e.span()))], e.span()),
        Expr::List(e) => {
            let list = ast::List { items: e.items.iter().map(expr).collect() };
            call(KEPT, [Expr::List(node(list, e.span()))], e.span())
        }
        Expr::Map(e) => {
            let map = ast::Map { keys: e.keys.iter().map(expr).collect(), values: e.values.iter().map(expr).collect() };
            call(KEPT, [Expr::Map(node(map, e.span()))], e.span())
        }
        Expr::UnaryOp(e) => {
            let negates = matches!(e.op, ast::UnaryOpKind::Not);
            let op = if negates { ast::UnaryOpKind::Not } else { ast::UnaryOpKind::Neg };
            Expr::UnaryOp(node(ast::UnaryOp { op, expr: expr(&e.expr) }, e.span()))
        }
        Expr::IfExpr(e) => Expr::IfExpr(node(
            ast::IfExpr {
                test_expr: expr(&e.test_expr),
                true_expr: expr(&e.true_expr),
                false_expr: e.false_expr.as_ref().map(expr),
            },
            e.span(),
        )),
        Expr::GetAttr(e) => Expr::GetAttr(node(ast::GetAttr { expr: expr(&e.expr), name: e.name }, e.span())),
        Expr::GetItem(e) => Expr::GetItem(node(
            ast::GetItem { expr: indexed(&e.expr), subscript_expr: expr(&e.subscript_expr) },
            e.span(),
        )),
        Expr::Var(_) | Expr::Const(_) => plain(old),
    }
}

/// An assignment's target, copied.
fn plain<'a>(old: &Expr<'a>) -> Expr<'a> {
    match old {
        Expr::Var(e) => Expr::Var(node(ast::Var { id: e.id }, e.span())),
        Expr::Const(e) => Expr::Const(node(ast::Const { value: e.value.clone() }, e.span())),
        Expr::List(e) => Expr::List(node(ast::List { items: e.items.iter().map(plain).collect() }, e.span())),
        Expr::GetAttr(e) => Expr::GetAttr(node(ast::GetAttr { expr: plain(&e.expr), name: e.name }, e.span())),
        _ => expr(old),
    }
}

/// The filter of a block, whose input is the block's text.
fn block_filter<'a>(old: &Expr<'a>) -> Expr<'a> {
    match old {
        Expr::Filter(e) => {
            let input = e.expr.as_ref().map(block_filter);
            Expr::Filter(node(ast::Filter { name: e.name, expr: input, args: args(&e.args) }, e.span()))
        }
        _ => expr(old),
    }
}

fn filter_parts<'a>(old: &ast::Filter<'a>) -> ast::Filter<'a> {
    let input = match old.name {
        // These must see an undefined value as it is.
        "default" | "d" => old.expr.as_ref().map(expr),
        "length" | "count" | "first" | "last" => old.expr.as_ref().map(indexed),
        _ => old.expr.as_ref().map(checked),
    };
    ast::Filter { name: old.name, expr: input, args: args(&old.args) }
}

fn call_parts<'a>(old: &ast::Call<'a>) -> ast::Call<'a> {
    let callee = match &old.expr {
        Expr::GetAttr(method) => {
            Expr::GetAttr(node(ast::GetAttr { expr: checked(&method.expr), name: method.name }, method.span()))
        }
        other => expr(other),
    };
    ast::Call { expr: callee, args: args(&old.args) }
}

fn args<'a>(old: &[CallArg<'a>]) -> Vec<CallArg<'a>> {
    let one = |arg: &CallArg<'a>| match arg {
        CallArg::Pos(e) => CallArg::Pos(checked(e)),
        CallArg::Kwarg(name, e) => CallArg::Kwarg(name, expr(e)),
        CallArg::PosSplat(e) => CallArg::PosSplat(expr(e)),
        CallArg::KwargSplat(e) => CallArg::KwargSplat(expr(e)),
    };
    old.iter().map(one).collect()
}

fn span_of(expr: &Expr<'_>) -> Span {
    match expr {
        Expr::Var(e) => e.span(),
        Expr::Const(e) => e.span(),
        Expr::Slice(e) => e.span(),
        Expr::UnaryOp(e) => e.span(),
        Expr::BinOp(e) => e.span(),
        Expr::Compare(e) => e.span(),
        Expr::IfExpr(e) => e.span(),
        Expr::Filter(e) => e.span(),
        Expr::Test(e) => e.span(),
        Expr::GetAttr(e) => e.span(),
        Expr::GetItem(e) => e.span(),
        Expr::Call(e) => e.span(),
        Expr::List(e) => e.span(),
        Expr::Map(e) => e.span(),
    }
}
