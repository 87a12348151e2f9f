// Makes and updates elements.
//
// Names come from members of the deployment, so text is only ever set as text: there is no function
// here that parses markup. Inline styles are forbidden by the page's policy; a size or a position
// goes through a CSS custom property (`setVariable`) or an SVG attribute.

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else {
      setAttribute(node, name, value);
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child); // a string becomes a text node
  }
  return node;
}

/** An HTML element: `html("p", {class: "hint", on: {click}}, "text", element)`. */
export function html(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** `null`, `undefined` and `false` remove the attribute; `true` sets it without a value. */
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  // A write of an equal value would still invalidate the layout.
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
}

export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Sets a CSS custom property, such as `--share`. */
export function setVariable(node, name, value) {
  const text = String(value);
  if (node.style.getPropertyValue(name) !== text) node.style.setProperty(name, text);
}

/** Replaces the children; meant for what is drawn on a click, not for what is drawn each second. */
export function replaceChildren(node, ...children) {
  node.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined),
  );
}

/**
 * Keeps the children of `parent` in step with `items`, one element for each item. Elements stay
 * where their key stays, so that focus, hover and selection survive a redraw.
 *
 * `create(item)` returns a new element; `update(element, item)` writes the item into it.
 */
export class KeyedList {
  constructor(parent, create, update) {
    this.parent = parent;
    this.elements = new Map();
    this.create = create;
    this.update = update;
  }

  draw(items, keyOf) {
    const wanted = new Set();
    let place = this.parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      if (wanted.has(key)) continue; // two items with one key would take turns with one element
      wanted.add(key);
      let element = this.elements.get(key);
      if (element === undefined) {
        element = this.create(item);
        this.elements.set(key, element);
      }
      this.update(element, item);
      if (element === place) {
        place = place.nextElementSibling;
      } else {
        this.parent.insertBefore(element, place);
      }
    }
    for (const [key, element] of this.elements) {
      if (!wanted.has(key)) {
        element.remove();
        this.elements.delete(key);
      }
    }
  }
}

/** Returns a function that asks for one `draw` in the next animation frame. */
export function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

/** Calls `changed(width)` when the element is laid out and whenever its width changes. */
export function observeWidth(element, changed) {
  let width = 0;
  // In a frame of its own, because drawing may change sizes, which an observer must not do.
  const report = oncePerFrame(() => {
    const found = Math.floor(element.getBoundingClientRect().width);
    if (found === width) return;
    width = found;
    changed(width);
  });
  new ResizeObserver(report).observe(element);
}
